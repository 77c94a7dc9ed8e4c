"""The register of methods, and their public classes on demand.

``METHODS`` is the one list that everything is parametrised over: the command line, the README's table, the tests. A new
method is one record here, plus its folder, data module, configs and tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite import import_lazily


@dataclass(frozen=True)
class MethodRecord:
    """One method.

    Args:
        slug: the name of its folder under ``modules/`` and ``configs/``, of its data module's file and its docs page.
        title: what it does, in a few words.
        paper: the paper's title, as published at ICML 2026.
        arxiv: the arXiv identifier.
        classes: public class name -> the module that defines it; the main LightningModule first.
    """

    slug: str
    title: str
    paper: str
    arxiv: str
    classes: Mapping[str, str]


METHODS: Mapping[str, MethodRecord] = {
    record.slug: record
    for record in (
        MethodRecord(
            slug="rocp",
            title="Risk-optimal conformal prediction",
            paper="Optimal Decision-Making Based on Prediction Sets",
            arxiv="2602.00989",
            classes={
                "Classifier": "fulgurite.modules.rocp.module",
                "ConformalDecision": "fulgurite.modules.rocp.functional_decision",
            },
        ),
        MethodRecord(
            slug="pave",
            title="Critic regularisation for smooth policies",
            paper="Stabilizing the Q-Gradient Field for Policy Smoothness in Actor-Critic",
            arxiv="2601.22970",
            classes={
                "TD3": "fulgurite.modules.pave.module",
                "SAC": "fulgurite.modules.pave.module",
            },
        ),
    )
}

CLASSES: Mapping[str, str] = {name: path for record in METHODS.values() for name, path in record.classes.items()}

# What a method, or somebody's own LightningModule, is made with.
BASES: Mapping[str, str] = {
    "LossContext": "fulgurite.modules.loss_terms",
    "LossTerm": "fulgurite.modules.loss_terms",
    "LossTerms": "fulgurite.modules.loss_terms",
    "Method": "fulgurite.modules.base",
}


def __getattr__(name: str) -> Any:
    return import_lazily(__name__, {**CLASSES, **BASES}, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *CLASSES, *BASES])
