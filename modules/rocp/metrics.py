"""torchmetrics of prediction sets and of the decisions made with them.

Every ``update`` takes what it needs of ``sets`` (N, K) boolean, ``actions`` (N,) and ``labels`` (N,) by keyword, so
that all of them work in one ``MetricCollection``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from fulgurite.modules.rocp.functional import check_alpha, check_loss, robust_risk


def covered(sets: Tensor, labels: Tensor) -> Tensor:
    """Whether each set (N, K) holds its label (N,)."""
    return sets.gather(1, labels[:, None]).squeeze(1)


class SetCoverage(Metric):
    """Share of the sets that hold the true label."""

    higher_is_better = True
    full_state_update = False
    hits: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, sets: Tensor, labels: Tensor) -> None:
        self.hits += covered(sets, labels).sum()
        self.total += len(labels)

    def compute(self) -> Tensor:
        return self.hits / self.total


class SetSize(Metric):
    """Mean number of labels in a set."""

    higher_is_better = False
    full_state_update = False
    size: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("size", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, sets: Tensor) -> None:
        self.size += sets.sum()
        self.total += len(sets)

    def compute(self) -> Tensor:
        return self.size / self.total


class StratifiedCoverage(Metric):
    """Coverage within strata: of each label, or of each set size.

    Args:
        n_labels: K.
        by: ``"label"`` gives (K,) coverages, ``"size"`` gives (K + 1,), for the sizes 0 to K; NaN where there is no
            sample.

    Raises:
        ValueError: ``by`` is something else.
    """

    higher_is_better = True
    full_state_update = False
    hits: Tensor
    total: Tensor

    def __init__(self, n_labels: int, by: str) -> None:
        super().__init__()
        if by not in ("label", "size"):
            raise ValueError(f"by is {by!r}; choose 'label' or 'size'")
        self.by = by
        strata = n_labels + (by == "size")
        self.add_state("hits", torch.zeros(strata, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(strata, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, sets: Tensor, labels: Tensor) -> None:
        stratum = labels if self.by == "label" else sets.sum(1)
        self.total += torch.bincount(stratum, minlength=len(self.total))
        self.hits += torch.bincount(stratum[covered(sets, labels)], minlength=len(self.total))

    def compute(self) -> Tensor:
        return self.hits / self.total


class DecisionLoss(Metric):
    """The loss of the actions on the true labels: its mean, and high quantiles of it.

    Args:
        loss: (K, A).
        quantiles: levels of the quantiles, in [0, 1]; the smallest loss that at least this share does not exceed.

    Raises:
        ValueError: the loss matrix or a level is not valid.
    """

    higher_is_better = False
    full_state_update = False
    losses: list[Tensor]

    def __init__(self, loss: Tensor, quantiles: Sequence[float] = ()) -> None:
        super().__init__()
        if not all(0 <= level <= 1 for level in quantiles):
            raise ValueError(f"quantiles are {list(quantiles)}; give levels in [0, 1]")
        self.loss = check_loss(loss)
        self.quantiles = list(quantiles)
        self.add_state("losses", [], dist_reduce_fx="cat")

    def update(self, actions: Tensor, labels: Tensor) -> None:
        self.losses.append(self.loss.to(labels.device)[labels, actions])

    def compute(self) -> dict[str, Tensor]:
        losses = torch.cat(self.losses) if isinstance(self.losses, list) else self.losses
        found = {"loss": losses.mean()}
        for level in self.quantiles:
            found[f"loss_q{100 * level:g}".replace(".", "_")] = losses.quantile(level, interpolation="higher")
        return found


class CriticalMistakes(Metric):
    """How often a critical action is taken: over all samples (first), and among the samples of each label.

    Args:
        n_labels: K.
        n_actions: A.
        critical: pairs (label, action) that are critical mistakes.

    Raises:
        ValueError: a pair is out of range.
    """

    higher_is_better = False
    full_state_update = False
    mistakes: Tensor
    total: Tensor

    def __init__(self, n_labels: int, n_actions: int, critical: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.is_critical = torch.zeros(n_labels, n_actions, dtype=torch.bool)
        for label, action in critical:
            if not (0 <= label < n_labels and 0 <= action < n_actions):
                raise ValueError(
                    f"critical pair ({label}, {action}) lies outside {n_labels} labels and {n_actions} actions"
                )
            self.is_critical[label, action] = True
        self.add_state("mistakes", torch.zeros(n_labels, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(n_labels, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, actions: Tensor, labels: Tensor) -> None:
        wrong = self.is_critical.to(labels.device)[labels, actions]
        self.mistakes += torch.bincount(labels[wrong], minlength=len(self.mistakes))
        self.total += torch.bincount(labels, minlength=len(self.total))

    def compute(self) -> Tensor:
        return torch.cat([(self.mistakes.sum() / self.total.sum())[None], self.mistakes / self.total])


class MeanRobustRisk(Metric):
    """Mean worst-case risk of the chosen actions over all laws that the sets allow, see ``functional.robust_risk``.

    Args:
        loss: (K, A).
        alpha: miscoverage.

    Raises:
        ValueError: the loss matrix or alpha is not valid.
    """

    higher_is_better = False
    full_state_update = False
    risk: Tensor
    total: Tensor

    def __init__(self, loss: Tensor, alpha: float) -> None:
        super().__init__()
        self.loss, self.alpha = check_loss(loss), check_alpha(alpha)
        self.add_state("risk", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, sets: Tensor, actions: Tensor) -> None:
        self.risk += robust_risk(sets, self.loss.to(sets.device), self.alpha).gather(1, actions[:, None]).sum()
        self.total += len(sets)

    def compute(self) -> Tensor:
        return self.risk / self.total
