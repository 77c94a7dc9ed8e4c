"""Risk of an action under a coverage guarantee, and the rules that choose an action.

Notation: K labels, A actions; ``loss`` (K, A) has true labels as rows and actions as columns; ``sets`` (N, K) is
boolean; ``probabilities`` (N, K). Everything is computed in float64.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

PROBABILITY_TOLERANCE = 1e-6


def check_probabilities(probabilities: Any) -> Tensor:
    """Probabilities (N, K) as float64, rows scaled to sum to one exactly.

    Raises:
        ValueError: the shape is not (N, K), a value is negative or not finite, or a row does not sum to one within
            1e-6.
    """
    p = as_float64(probabilities)
    if p.ndim != 2 or p.shape[1] < 2:
        raise ValueError(f"probabilities have shape {tuple(p.shape)}; give (samples, labels) with at least 2 labels")
    total = p.sum(1, keepdim=True)
    off = (total - 1).abs()
    # One pass where all is well: a value that is not finite makes a row's sum so.
    if len(p) and not (p.min() >= 0 and off.max() <= PROBABILITY_TOLERANCE):
        wrong = (~torch.isfinite(p) | (p < 0)).any(1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(f"probabilities of row {row} are {p[row].tolist()}; they must be finite and at least 0")
        row = int(off.flatten().argmax())
        raise ValueError(f"probabilities of row {row} sum to {total[row].item():.6g}, not to 1; give softmax outputs")
    # A row that sums to one up to rounding stays as it is, so that checking twice changes no bit.
    rounding = p.shape[1] * torch.finfo(p.dtype).eps
    return p if len(p) == 0 or off.max() <= rounding else p / torch.where(off <= rounding, 1.0, total)


def as_float64(values: Any) -> Tensor:
    """An array, a list or a Tensor as float64; a list is never rounded to float32 on the way."""
    return values.double() if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values, dtype=np.float64))


def check_labels(labels: Any, n_labels: int) -> Tensor:
    """Labels (N,) as integers.

    Raises:
        ValueError: a label is no whole number, or lies outside 0..n_labels-1.
    """
    given = labels if isinstance(labels, Tensor) else torch.from_numpy(np.asarray(labels))
    if given.ndim != 1:
        raise ValueError(f"labels have shape {tuple(given.shape)}; give (samples,)")
    y = given.long()
    if given.is_floating_point() and not torch.equal(y.to(given.dtype), given):
        wrong = given[y.to(given.dtype) != given][0].item()
        raise ValueError(f"labels hold {wrong}; give whole numbers from 0 to {n_labels - 1}")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= n_labels):
        raise ValueError(
            f"labels run from {int(y.min())} to {int(y.max())}; with {n_labels} labels they are 0..{n_labels - 1}"
        )
    return y


def check_loss(loss: Any, n_labels: int | None = None) -> Tensor:
    """A loss matrix (K, A) as float64.

    Raises:
        ValueError: the shape does not fit the labels, or a loss is negative or not finite.
    """
    matrix = as_float64(loss)
    if matrix.ndim != 2 or matrix.shape[1] == 0 or (n_labels is not None and len(matrix) != n_labels):
        expected = f"({n_labels}, actions)" if n_labels is not None else "(labels, actions)"
        raise ValueError(
            f"the loss matrix has shape {tuple(matrix.shape)}, expected {expected}: rows are true labels, columns are "
            "actions"
        )
    if not torch.isfinite(matrix).all():
        raise ValueError("the loss matrix holds a value that is not finite")
    if (matrix < 0).any():
        raise ValueError(
            f"the loss matrix holds {matrix.min().item():g}; losses are at least 0: adding a constant to the whole "
            "matrix changes no set and no action"
        )
    return matrix


def check_alpha(alpha: float) -> float:
    """The miscoverage level.

    Raises:
        ValueError: it is not strictly between 0 and 1.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; give a miscoverage level strictly between 0 and 1, such as 0.1")
    return alpha


def required_rank(n: int, alpha: float) -> int:
    """``ceil((1 - alpha)(n + 1))``: how many of n + 1 exchangeable points must be covered (conformal quantile's rank).

    The product is rounded first, so that 0.9 * 10 asks for 9 points and not, by the last bit, for 10.
    """
    return math.ceil(round((1 - alpha) * (n + 1), 9))


def robust_risk(sets: Tensor, loss: Tensor, alpha: float) -> Tensor:
    """Worst-case expected loss (N, A) of every action over all laws of the label that lie in the set with 1 - alpha.

    ``R(a; C) = in(a) + alpha max(0, out(a) - in(a))`` with ``in`` and ``out`` the largest losses inside and outside the
    set (Lemma 2.1). An empty set counts as all labels: the worst label is planned for.

    Args:
        sets: (N, K) boolean.
        loss: (K, A).
        alpha: miscoverage; 0 gives the max-min risk, 1 ignores the set.
    """
    table = check_loss(loss, sets.shape[1])
    sets = sets | ~sets.any(1, keepdim=True)
    inside = _largest(sets, table)
    outside = _largest(~sets, table)
    return inside + alpha * (outside - inside).clamp(min=0)


def _largest(members: Tensor, loss: Tensor) -> Tensor:
    """The largest loss (N, A) over the member labels; minus infinity where there is none."""
    result = torch.full((len(members), loss.shape[1]), -torch.inf, dtype=loss.dtype)
    for label, row in enumerate(loss):  # K small steps keep the memory at (N, A)
        result = torch.where(members[:, label, None], torch.maximum(result, row), result)
    return result


def smallest_index_of_minimum(values: Tensor, tolerance: float = 1e-12) -> Tensor:
    """The first index along the last axis whose value is the minimum, up to a relative tolerance: the tie rule."""
    least = values.min(-1, keepdim=True).values
    return (values <= least + tolerance * least.abs()).to(torch.uint8).argmax(-1)


def minimax_action(sets: Tensor, loss: Tensor, alpha: float) -> Tensor:
    """The action (N,) of least robust risk, ties to the smallest index (Theorem 2.2); alpha = 0 is the max-min rule."""
    return smallest_index_of_minimum(robust_risk(sets, loss, alpha))


def best_response(probabilities: Tensor, loss: Tensor) -> Tensor:
    """The action (N,) of least expected loss under the probabilities, which it trusts."""
    p = check_probabilities(probabilities)
    return smallest_index_of_minimum(p @ check_loss(loss, p.shape[1]))
