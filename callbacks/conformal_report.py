"""What a conformal test reports: the metrics of each arm, tables, figures, and the loss matrix it was given."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from fulgurite.modules.rocp.figures import coverage_figure, decision_figure, hull_figure, sweep_figure
from fulgurite.modules.rocp.functional_curve import Curve
from fulgurite.modules.rocp.functional_decision import CURVES, ConformalDecision
from fulgurite.modules.rocp.metrics import (
    CriticalMistakes,
    DecisionLoss,
    MeanRobustRisk,
    SetCoverage,
    SetSize,
    StratifiedCoverage,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Names = tuple[list[str], list[str]]  # of the labels, of the actions


@dataclass(frozen=True)
class TestedArm:
    """A calibrated decision and what it did with the test samples.

    Args:
        decision: fitted.
        probabilities: (N, K).
        labels: (N,).
        sets: (N, K).
        actions: (N,); None without a loss matrix.
    """

    __test__ = False  # pytest: this is no test

    decision: ConformalDecision
    probabilities: Tensor
    labels: Tensor
    sets: Tensor
    actions: Tensor | None

    @classmethod
    def of(cls, decision: ConformalDecision, probabilities: Tensor, labels: Tensor) -> "TestedArm":
        """Decide on the test samples."""
        if decision.loss is None:
            return cls(decision, probabilities, labels, decision.predict_sets(probabilities), None)
        return cls(decision, probabilities, labels, *decision.decide(probabilities))

    @property
    def makes_sets(self) -> bool:
        """Whether the arm's action depends on a set at all."""
        return self.decision.rule != "best_response"


def names_of(labels: Sequence[str] | None, n_labels: int, actions: Sequence[str] | None, n_actions: int) -> Names:
    """The names of the labels and of the actions; those that were not given are numbers.

    Raises:
        ValueError: there are too few or too many.
    """
    labels = list(labels or [str(label) for label in range(n_labels)])
    actions = list(actions or [f"action {action}" for action in range(n_actions)])
    for what, names, number in (("label_names", labels, n_labels), ("action_names", actions, n_actions)):
        if len(names) != number and number:
            raise ValueError(f"{what} has {len(names)} names, {number} are needed")
    return labels, actions


def measure(
    arm: TestedArm, critical: Sequence[tuple[int, int]], quantiles: Sequence[float], label_names: Sequence[str]
) -> dict[str, float]:
    """The metrics of one arm by name; those of sets are left out where the rule makes none.

    Args:
        arm: the arm.
        critical: pairs (label, action).
        quantiles: levels of the loss quantiles.
        label_names: become part of the names of the metrics by label.
    """
    loss, n_labels = arm.decision.loss, arm.sets.shape[1]
    row: dict[str, float] = {}
    if arm.makes_sets:
        row["coverage"] = _value(SetCoverage(), sets=arm.sets, labels=arm.labels).item()
        row["size"] = _value(SetSize(), sets=arm.sets).item()
    if loss is not None and arm.actions is not None:
        acted = {"actions": arm.actions, "labels": arm.labels}
        row |= {name: value.item() for name, value in _value(DecisionLoss(loss, quantiles), **acted).items()}
        if critical:
            rates = _value(CriticalMistakes(loss.shape[0], loss.shape[1], critical), **acted)
            row["critical"] = rates[0].item()
            for label in sorted({label for label, _ in critical}):
                row[f"critical_{_metric_name(label_names[label])}"] = rates[1 + label].item()
        if arm.makes_sets:
            risk = MeanRobustRisk(loss, arm.decision.alpha)
            row["robust_risk"] = _value(risk, sets=arm.sets, actions=arm.actions).item()
    if arm.makes_sets:
        for by in ("label", "size"):
            by_stratum = _value(StratifiedCoverage(n_labels, by), sets=arm.sets, labels=arm.labels)
            strata = by_stratum if by == "label" else by_stratum[1:]  # an empty set never covers
            strata = strata[~strata.isnan()]
            if len(strata):
                row[f"worst_{by}_coverage"] = strata.min().item()
            if by == "label":
                row |= {
                    f"coverage_{_metric_name(name)}": value
                    for name, value in zip(label_names, by_stratum.tolist(), strict=True)
                }
    return row


def _value(metric: Metric, **fields: Tensor) -> Any:
    metric.sync_on_compute = False  # every rank holds all samples: there is nothing to reduce
    metric.update(**fields)
    return metric.compute()


def draw(arms: Mapping[str, TestedArm], names: Names, sweep: Sequence[float]) -> dict[str, "Figure"]:
    """The figures of a test by name; none without a loss matrix.

    Args:
        arms: the arms by name.
        names: of labels and actions.
        sweep: levels of alpha for the loss against alpha.
    """
    acted = {name: arm for name, arm in arms.items() if arm.actions is not None}
    if not acted:
        return {}
    figures = {"decisions": decision_figure({name: _decision_counts(arm) for name, arm in acted.items()}, *names)}
    if sweep:
        losses = {name: [_mean_loss(arm, level) for level in sweep] for name, arm in acted.items()}
        figures["loss_against_alpha"] = sweep_figure(sweep, losses)
    curve = next((arm for arm in acted.values() if arm.decision.score in CURVES and arm.makes_sets), None)
    if curve is not None:
        decision = curve.decision
        n = 0 if decision.labels_ is None else len(decision.labels_)
        figures["coverage_curve"] = coverage_figure(decision.calibrations_[0], n, decision.alpha)
        kind: Curve = "rac" if decision.score == "rac" else "rocp"
        assert decision.loss is not None
        figures["hulls"] = hull_figure(_varied(curve.probabilities), decision.loss, kind)
    return figures


def _decision_counts(arm: TestedArm) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each action was taken for each label, (K, A)."""
    assert arm.decision.loss is not None
    assert arm.actions is not None
    n_labels, n_actions = arm.decision.loss.shape
    flat = torch.bincount(arm.labels * n_actions + arm.actions, minlength=n_labels * n_actions)
    return flat.reshape(n_labels, n_actions).numpy()


def _mean_loss(arm: TestedArm, alpha: float) -> float:
    actions = arm.decision.recalibrate(alpha=alpha).predict(arm.probabilities)
    assert arm.decision.loss is not None
    return float(arm.decision.loss[arm.labels, actions].mean())


def _varied(probabilities: Tensor) -> Tensor:
    """Four samples for a figure, from the least sure to the middle one: a sure one has nothing to choose."""
    order = probabilities.max(1).values.argsort(stable=True)
    return probabilities[order[(torch.tensor([0.0, 0.05, 0.15, 0.5]) * len(order)).long()]]


def critical_pairs(pairs: Sequence[tuple[str | int, str | int]], names: Names) -> list[tuple[int, int]]:
    """Pairs (label, action) as numbers.

    Raises:
        ValueError: a name is unknown.
    """

    def number(name: str | int, known: list[str], what: str) -> int:
        if isinstance(name, int):
            return name
        if name not in known:
            raise ValueError(f"critical names the {what} {name!r}; known are {', '.join(known)}")
        return known.index(name)

    return [(number(label, names[0], "label"), number(action, names[1], "action")) for label, action in pairs]


def table_rows(rows: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """The arms as a table of text with a header, one arm a row."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    body = [[arm, *(f"{row[name]:.6g}" if name in row else "" for name in columns)] for arm, row in rows.items()]
    return [["arm", *columns], *body]


def table_csv(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The arms as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table_rows(rows))
    return text.getvalue()


def table_markdown(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The arms as a Markdown table."""
    header, *body = ["| " + " | ".join(row) + " |" for row in table_rows(rows)]
    return "\n".join([header, "|" + " --- |" * (header.count("|") - 1), *body])


def read_loss_matrix(path: Path) -> tuple[Tensor, list[str] | None, list[str] | None]:
    """A loss matrix from ``.npy`` or ``.csv``, with the names of its labels and actions where a CSV has them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a table of numbers.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"loss_matrix {str(path)!r}: there is no such file; give rows of numbers, a .csv or a .npy"
        )
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float64)), None, None
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row]
    actions = labels = None
    if rows and not any(_is_number(cell) for cell in rows[0]):
        actions, rows = [name.strip() for name in rows[0]], rows[1:]
    if rows and not _is_number(rows[0][0]):
        labels, rows = [row[0].strip() for row in rows], [row[1:] for row in rows]
        actions = actions[1:] if actions else None
    if not rows or len({len(row) for row in rows}) != 1 or not all(_is_number(cell) for row in rows for cell in row):
        raise ValueError(
            f"loss_matrix {str(path)!r}: give a table of numbers; rows are true labels, columns are actions"
        )
    return torch.tensor([[float(cell) for cell in row] for row in rows], dtype=torch.float64), labels, actions


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _metric_name(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)
