"""The callbacks on demand; each works in any LightningModule's Trainer."""

from collections.abc import Mapping
from typing import Any

from fulgurite import import_lazily

CLASSES: Mapping[str, str] = {
    "Arm": "fulgurite.callbacks.conformal",
    "ASAP": "fulgurite.callbacks.smoothness",
    "AtomicCheckpointIO": "fulgurite.callbacks.reproducibility",
    "CAPS": "fulgurite.callbacks.smoothness",
    "ConformalCalibration": "fulgurite.callbacks.conformal",
    "FigureSaver": "fulgurite.callbacks.reporting",
    "FiniteGuard": "fulgurite.callbacks.reproducibility",
    "GRAD": "fulgurite.callbacks.smoothness",
    "GradientPenalty": "fulgurite.callbacks.smoothness",
    "L2C2": "fulgurite.callbacks.smoothness",
    "LossTermCallback": "fulgurite.callbacks.loss_term",
    "PAVE": "fulgurite.callbacks.pave",
    "PlainProgress": "fulgurite.callbacks.reporting",
    "PolicyEvaluation": "fulgurite.callbacks.policy_evaluation",
    "PredictionFile": "fulgurite.callbacks.reporting",
    "Preemption": "fulgurite.callbacks.reproducibility",
    "RandomState": "fulgurite.callbacks.reproducibility",
    "RunCheckpoint": "fulgurite.callbacks.reproducibility",
}


def __getattr__(name: str) -> Any:
    return import_lazily(__name__, CLASSES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *CLASSES])
