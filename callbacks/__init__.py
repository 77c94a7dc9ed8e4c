"""The callbacks on demand; each works in any LightningModule's Trainer."""

from collections.abc import Mapping
from typing import Any

from fulgurite import import_lazily

CLASSES: Mapping[str, str] = {
    "Arm": "fulgurite.callbacks.conformal",
    "AtomicCheckpointIO": "fulgurite.callbacks.reproducibility",
    "ConformalCalibration": "fulgurite.callbacks.conformal",
    "FigureSaver": "fulgurite.callbacks.reporting",
    "FiniteGuard": "fulgurite.callbacks.reproducibility",
    "LossTermCallback": "fulgurite.callbacks.loss_term",
    "PlainProgress": "fulgurite.callbacks.reporting",
    "PredictionFile": "fulgurite.callbacks.reporting",
    "Preemption": "fulgurite.callbacks.reproducibility",
    "RandomState": "fulgurite.callbacks.reproducibility",
    "RunCheckpoint": "fulgurite.callbacks.reproducibility",
}


def __getattr__(name: str) -> Any:
    return import_lazily(__name__, CLASSES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *CLASSES])
