"""Non-conformity scores of labels, and ordinary split conformal sets from them.

A score function maps probabilities (N, K) to scores (N, K) in float64; a small score means that the label conforms. The
set of a sample is every label whose score is at most the calibrated threshold.
"""

import torch
from torch import Tensor

from fulgurite.modules.rocp.functional import check_alpha, check_labels, check_probabilities, required_rank


def lac_scores(probabilities: Tensor) -> Tensor:
    """LAC (also THR, LAS): one minus the label's probability (Sadinle, Lei, Wasserman 2019)."""
    return 1 - check_probabilities(probabilities)


def aps_scores(probabilities: Tensor, uniform: Tensor | None = None) -> Tensor:
    """APS: the total probability of the labels ranked at or above the label (Romano, Sesia, Candes 2020).

    Args:
        probabilities: (N, K).
        uniform: (N,) in [0, 1); given, the score is randomised: less ``uniform`` times the label's probability.
    """
    p = check_probabilities(probabilities)
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    scores = torch.empty_like(p).scatter_(1, order, ordered.cumsum(1))
    return scores if uniform is None else scores - uniform.double()[:, None] * p


def raps_scores(
    probabilities: Tensor, penalty: float = 0.05, free_rank: int = 1, uniform: Tensor | None = None
) -> Tensor:
    """RAPS: APS plus ``penalty`` for every rank (from 1) beyond ``free_rank`` (Angelopoulos et al. 2021).

    Raises:
        ValueError: ``penalty`` or ``free_rank`` is negative.
    """
    if not 0 <= penalty < float("inf") or free_rank < 0:
        raise ValueError(f"penalty and free_rank are {penalty} and {free_rank}; give values of at least 0")
    p = check_probabilities(probabilities)
    return aps_scores(p, uniform) + penalty * (ranks(p) - free_rank).clamp(min=0)


def ranks(p: Tensor) -> Tensor:
    """The rank of each label from 1, the most probable first, ties to the smaller label."""
    order = p.argsort(dim=1, descending=True, stable=True)
    positions = torch.arange(1, p.shape[1] + 1, dtype=torch.float64).expand_as(p)
    return torch.empty_like(p).scatter_(1, order, positions)


def socop_scores(probabilities: Tensor, penalty: float = 0.1) -> Tensor:
    """SOCOP: sets that are singletons where possible (arXiv 2509.24095).

    Sorted by probability, the first j labels have mass ``m_j`` and cost ``c_j = penalty j + 1{j >= 2}``. A label's
    score is the slope of the lower convex hull of (mass, cost) over the segment that its rank lies on. Ranks 0 and 1
    are always vertices; from rank 2 on the points are convex, so that the hull goes from rank 1 straight to the rank
    ``t`` of least slope and then along the points.

    Raises:
        ValueError: ``penalty`` is not positive.
    """
    if not 0 < penalty < float("inf"):
        raise ValueError(f"penalty is {penalty}; SOCOP needs a value above 0")
    p = check_probabilities(probabilities)
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    beyond_first = torch.arange(1, p.shape[1], dtype=p.dtype)
    chords = (penalty * beyond_first + 1) / ordered[:, 1:].cumsum(1)  # from rank 1 to the ranks 2, 3, ...
    least, tangent = chords.min(1, keepdim=True)
    slopes = penalty / ordered
    slopes[:, 1:] = torch.where(beyond_first - 1 <= tangent, least, slopes[:, 1:])
    return torch.empty_like(p).scatter_(1, order, slopes)


def conformal_threshold(scores: Tensor, alpha: float) -> float:
    """The ``ceil((1 - alpha)(n + 1))``-th smallest of n calibration scores; infinite where there are too few."""
    rank = required_rank(len(scores), check_alpha(alpha))
    return torch.inf if rank > len(scores) else float(scores.sort().values[rank - 1])


def score_thresholds(scores: Tensor, labels: Tensor, alpha: float, class_conditional: bool = False) -> Tensor:
    """The threshold (K,) of each label: a common one, or one from the calibration samples of that label alone.

    Args:
        scores: (N, K) of the calibration samples.
        labels: (N,).
        alpha: miscoverage.
        class_conditional: covers each label with 1 - alpha, not only their mixture (Mondrian).

    Raises:
        ValueError: there are no samples, or with ``class_conditional`` none of some label.
    """
    n_labels = scores.shape[1]
    labels = check_labels(labels, n_labels)
    if len(labels) == 0:
        raise ValueError("the calibration set is empty")
    own = scores.gather(1, labels[:, None]).squeeze(1)
    if not class_conditional:
        return torch.full((n_labels,), conformal_threshold(own, alpha), dtype=torch.float64)
    check_every_label_present(labels, n_labels)
    thresholds = [conformal_threshold(own[labels == label], alpha) for label in range(n_labels)]
    return torch.tensor(thresholds, dtype=torch.float64)


def check_every_label_present(labels: Tensor, n_labels: int) -> None:
    """Class-conditional calibration needs samples of every label.

    Raises:
        ValueError: naming the labels that are missing.
    """
    counts = torch.bincount(labels, minlength=n_labels)
    if (counts == 0).any():
        missing = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(f"class-conditional calibration has no sample of the labels {missing}")
