"""Prediction sets made for a decision: ROCP's robust curve, RAC's, their selector, and the exact calibration.

For a sample with probabilities p (K,) and a level t in [0, 1] the best set that holds the label with conditional
probability t is ``C0(p, t) = {y : loss[y, a] <= theta}`` for an action ``a`` and a loss quantile ``theta``; a curve
V(p, t)
says what it is worth. The selector trades the value against coverage at a price ``beta``:
``g(p, beta) = argmin_t V(p, t) - beta t``, ties to the largest t. So only the vertices of the lower convex hull of V
matter, and vertex j is selected for beta in [beta_j, beta_{j+1}).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fulgurite.modules.rocp.functional import check_alpha, check_labels, check_loss, check_probabilities, required_rank
from fulgurite.modules.rocp.functional_scores import check_every_label_present

LEVEL_TOLERANCE = 1e-11  # the same labels summed in two orders differ by an ulp
VALUE_TOLERANCE = 1e-12  # in units of min_a max_y loss, which bounds V: a prohibitive loss elsewhere does not count
PRICE_TOLERANCE = 1e-9  # relative; breakpoints of equal price computed from different samples
CHUNK_ELEMENTS = 2_000_000  # numbers held at once in one temporary array

Curve = Literal["rocp", "rac"]
Mode = Literal["exact", "plus", "global"]


@dataclass(frozen=True)
class Hulls:
    """The vertices of N samples that are selected for some price, sample after sample, by rising price.

    Args:
        sample: (M,) index of the sample.
        price: (M,) the price from which the vertex is selected; 0 for a sample's first.
        until: (M,) the price from which the next one is; infinite for a sample's last.
        level: (M,) t.
        value: (M,) V.
        action: (M,) the action behind the vertex.
        quantile: (M,) theta.
        n_samples: N.
    """

    sample: Tensor
    price: Tensor
    until: Tensor
    level: Tensor
    value: Tensor
    action: Tensor
    quantile: Tensor
    n_samples: int


def curve_points(probabilities: Tensor, loss: Tensor, curve: Curve) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points whose lower convex hull is that of V(p, t) over t in [0, 1].

    For an action a, theta(p, t, a) is the t-quantile of ``loss[Y, a]``: constant on plateaus that end at
    ``t = P(loss[Y, a] <= v)`` for the distinct losses v. ROCP's ``V = min_a t theta + (1 - t) max_y loss[y, a]`` falls
    on a plateau and lies there above the chord from (0, max loss) to the plateau's end; RAC's ``V = min_a theta`` is
    constant. So the ends, and one point at t = 0, are enough: one candidate for each distinct loss of each action.

    Args:
        probabilities: (N, K), float64.
        loss: (K, A), float64.
        curve: ``"rocp"`` or ``"rac"``.

    Returns:
        level (N, P), value (N, P), action (P,), quantile (P,).
    """
    worst = loss.max(0).values
    start = int(worst.argmin()) if curve == "rocp" else int(loss.min(0).values.argmin())
    # t = 0: all labels under the action of least worst loss (Remark 3.2); for RAC the single best loss.
    quantiles = [worst[start, None] if curve == "rocp" else loss[:, start].min()[None]]
    actions = [torch.tensor([start])]
    levels = [torch.zeros(len(probabilities), 1, dtype=torch.float64)]
    for number, column in enumerate(loss.T):
        distinct, place = column.unique(return_inverse=True)
        mass = torch.zeros(len(probabilities), len(distinct), dtype=torch.float64)
        mass.index_add_(1, place, probabilities)
        levels.append(mass.cumsum(1).clamp(max=1))
        quantiles.append(distinct)
        actions.append(torch.full((len(distinct),), number))
    level, quantile, action = torch.cat(levels, 1), torch.cat(quantiles), torch.cat(actions)
    if curve == "rac":
        return level, quantile.expand_as(level), action, quantile
    return level, worst[action] - level * (worst[action] - quantile), action, quantile


def selector_hulls(probabilities: Tensor, loss: Tensor, curve: Curve = "rocp") -> Hulls:
    """The selector of every sample, as the vertices of its hull on prices of at least 0.

    The hull is walked from its lowest point to the right, all samples of a chunk at once: the next vertex is the point
    of least slope. The number of steps is the number of vertices, which is small.

    Args:
        probabilities: (N, K).
        loss: (K, A).
        curve: ``"rocp"`` or ``"rac"``.

    Raises:
        ValueError: probabilities or losses are not valid.
    """
    p = check_probabilities(probabilities)
    loss = check_loss(loss, p.shape[1])
    n_points = 1 + sum(len(column.unique()) for column in loss.T)
    rows = max(1, CHUNK_ELEMENTS // n_points)
    steps = [
        step
        for first in range(0, len(p), rows)
        for step in _walk_hulls(*curve_points(p[first : first + rows], loss, curve), loss.max(0).values.min(), first)
    ]
    if not steps:
        empty = torch.empty(0, dtype=torch.float64)
        whole = torch.empty(0, dtype=torch.long)
        return Hulls(whole, empty, empty, empty, empty, whole, empty, 0)
    sample, price, level, value, action, quantile = (torch.cat(parts) for parts in zip(*steps, strict=True))
    order = sample.argsort(stable=True)  # steps come by rising price, so each sample's vertices stay in order
    sample, price, level, value = sample[order], price[order], level[order], value[order]
    last = torch.ones(len(sample), dtype=torch.bool)
    last[:-1] = sample[1:] != sample[:-1]
    until = torch.where(last, torch.inf, price.roll(-1))
    return Hulls(sample, price, until, level, value, action[order], quantile[order], len(p))


def _walk_hulls(
    level: Tensor, value: Tensor, action: Tensor, quantile: Tensor, scale: Tensor, first: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield (sample, price, level, value, action, quantile) of one vertex for every sample that still has one."""
    slack = VALUE_TOLERANCE * scale.clamp(min=1e-300)
    sample = torch.arange(len(level)) + first
    at = _choose(level, value, value <= value.min(1, keepdim=True).values + slack, slack)
    price = torch.zeros(len(level), dtype=torch.float64)
    while len(sample):
        here = (level.gather(1, at).squeeze(1), value.gather(1, at).squeeze(1))
        yield sample, price, *here, action[at.squeeze(1)], quantile[at.squeeze(1)]
        run = level - here[0][:, None]
        ahead = run > LEVEL_TOLERANCE
        slope = torch.where(ahead, (value - here[1][:, None]) / run, torch.inf)
        least = slope.min(1, keepdim=True).values
        going = least.squeeze(1) < torch.inf
        if not going.all():
            sample, price, level, value = sample[going], price[going], level[going], value[going]
            run, ahead, least, here = run[going], ahead[going], least[going], (here[0][going], here[1][going])
        on_line = ahead & (value - here[1][:, None] <= least * run + slack)
        at = _choose(level, value, on_line, slack)
        price = torch.maximum(price, least.squeeze(1))


def _choose(level: Tensor, value: Tensor, among: Tensor, slack: Tensor) -> Tensor:
    """Of the points on the supporting line the one of largest t; of equal ones the lowest, then the smallest action."""
    furthest = torch.where(among, level, -torch.inf).max(1, keepdim=True).values
    among = among & (level >= furthest - LEVEL_TOLERANCE)
    lowest = torch.where(among, value, torch.inf).min(1, keepdim=True).values
    among = among & (value <= lowest + slack)
    # Points are listed action by action, each by rising loss: the first is the smallest action with its smallest loss.
    # Point 0 (t = 0) never ties with another action's, since a level of 0 has the same value only for the same set.
    return among.to(torch.uint8).argmax(1, keepdim=True)


@dataclass(frozen=True)
class Calibration:
    """What the exact calibration needs at test time, for all labels or for one.

    Args:
        rank: k = ceil((1 - alpha)(n + 1)), how many of the calibration points and the candidate must be covered.
        price: beta_A, the least price at which k calibration points are covered; infinite where there is none.
        low: (J,) left ends of the price intervals below beta_A at which k - 1 are covered.
        high: (J,) their right ends, exclusive.
        breakpoints: (B,) all prices at which the number of covered calibration points changes, rising from 0.
        counts: (B,) covered calibration points from each breakpoint on.
    """

    rank: int
    price: float
    low: Tensor
    high: Tensor
    breakpoints: Tensor
    counts: Tensor


def coverage_steps(hulls: Hulls, covered: Tensor) -> tuple[Tensor, Tensor]:
    """The number of covered calibration points as a step function of the price.

    Args:
        hulls: of the calibration samples.
        covered: (M,) whether the sample's label lies in the vertex's set.

    Returns:
        breakpoints (B,), rising from 0, and the count (B,) from each on.
    """
    first = torch.ones(len(covered), dtype=torch.bool)
    first[1:] = hulls.sample[1:] != hulls.sample[:-1]
    before = torch.where(first, 0, covered.long().roll(1))
    change = covered.long() - before
    price, order = hulls.price.sort(stable=True)
    change = change[order]
    # Prices that differ in the last bits only are one breakpoint: between them nothing may happen.
    new = torch.ones(len(price), dtype=torch.bool)
    new[1:] = price[1:] - price[:-1] > PRICE_TOLERANCE * price[1:].abs().clamp(min=PRICE_TOLERANCE)
    group = new.long().cumsum(0) - 1
    total = torch.zeros(int(new.sum()), dtype=torch.long).index_add_(0, group, change)
    kept = total != 0
    kept[0] = True
    return price[new][kept], total[kept].cumsum(0)


def calibrate(hulls: Hulls, labels: Tensor, loss: Tensor, alpha: float, mode: Mode = "exact") -> Calibration:
    """Algorithm 1, once for all candidate labels.

    The coverage c(beta) is not monotone, so the prices are not searched by bisection: c is written out as a step
    function.

    Args:
        hulls: of the calibration samples.
        labels: (N,) their labels.
        loss: (K, A).
        alpha: miscoverage.
        mode: ``"exact"`` is the candidate-wise calibration, valid for exchangeable data; ``"plus"`` uses beta_A alone;
            ``"global"`` asks ceil((1 - alpha) n) of the calibration points and ignores the test point: no guarantee.

    Raises:
        ValueError: there are no samples, or alpha or a label is out of range.
    """
    if hulls.n_samples == 0:
        raise ValueError("the calibration set is empty")
    labels = check_labels(labels, len(loss))
    alpha = check_alpha(alpha)
    rank = required_rank(hulls.n_samples - (mode == "global"), alpha)
    covered = loss[labels[hulls.sample], hulls.action] <= hulls.quantile
    breakpoints, counts = coverage_steps(hulls, covered)
    enough = (counts >= rank).nonzero()
    reached = int(enough[0]) if len(enough) else len(counts)
    price = float(breakpoints[reached]) if len(enough) else torch.inf
    short = torch.zeros_like(counts[:reached], dtype=torch.bool) if mode != "exact" else counts[:reached] == rank - 1
    ends = torch.cat([breakpoints[1:], torch.tensor([torch.inf], dtype=torch.float64)])
    return Calibration(rank, price, breakpoints[:reached][short], ends[:reached][short], breakpoints, counts)


def price_sets(hulls: Hulls, loss: Tensor, calibration: Calibration) -> Tensor:
    """The calibrated sets (N, K) of test samples.

    A label is in iff it lies in the sample's set at beta_A, or at some price below it at which the calibration points
    are one short: there the candidate itself makes up the count. Where beta_A is infinite the set is all labels.
    """
    sets = torch.zeros(hulls.n_samples, len(loss), dtype=torch.bool)
    if calibration.price == torch.inf:
        return ~sets
    # A price that a calibration breakpoint equals but for the last bits counts as that breakpoint.
    price, until = _snap(hulls.price, calibration.breakpoints), _snap(hulls.until, calibration.breakpoints)
    used = (price <= calibration.price) & (calibration.price < until)
    if len(calibration.low):
        place = torch.searchsorted(calibration.high, price, right=True).clamp(max=len(calibration.high) - 1)
        used |= (calibration.high[place] > price) & (calibration.low[place] < until) & (price < until)
    sample, action, quantile = hulls.sample[used], hulls.action[used], hulls.quantile[used]
    for label, row in enumerate(loss):  # K small steps: a vertex has a set of K labels, and there are many vertices
        sets[sample[row[action] <= quantile], label] = True
    return sets


def _snap(price: Tensor, breakpoints: Tensor) -> Tensor:
    """Move prices onto the breakpoint that they equal within the tolerance."""
    place = torch.searchsorted(breakpoints, price)
    result = price.clone()
    for neighbour in ((place - 1).clamp(min=0), place.clamp(max=len(breakpoints) - 1)):
        near = breakpoints[neighbour]
        close = (price - near).abs() <= PRICE_TOLERANCE * near.abs().clamp(min=PRICE_TOLERANCE)
        result = torch.where(close, near, result)
    return result


def selected_action(hulls: Hulls, price: float) -> Tensor:
    """The action (N,) of the vertex that a price selects: the plug-in rule a(p, g(p, beta))."""
    if price == torch.inf:
        chosen = hulls.until == torch.inf
    else:
        here = torch.tensor([price], dtype=torch.float64)
        chosen = (_snap(hulls.price, here) <= price) & (price < _snap(hulls.until, here))
    actions = torch.empty(hulls.n_samples, dtype=torch.long)
    actions[hulls.sample[chosen]] = hulls.action[chosen]
    return actions


def calibrate_labels(
    hulls: Hulls, labels: Tensor, loss: Tensor, alpha: float, mode: Mode = "exact", class_conditional: bool = False
) -> list[Calibration]:
    """One calibration for all labels or, with ``class_conditional``, one for each label from its samples alone.

    Raises:
        ValueError: as :func:`calibrate`; or a label has no calibration sample.
    """
    if not class_conditional:
        return [calibrate(hulls, labels, loss, alpha, mode)]
    labels = check_labels(labels, len(loss))
    check_every_label_present(labels, len(loss))
    return [
        calibrate(subset(hulls, labels == label), labels[labels == label], loss, alpha, mode)
        for label in range(len(loss))
    ]


def calibrated_sets(hulls: Hulls, loss: Tensor, calibrations: Sequence[Calibration]) -> Tensor:
    """The sets (N, K) of test samples under the calibrations of :func:`calibrate_labels`."""
    if len(calibrations) == 1:
        return price_sets(hulls, loss, calibrations[0])
    columns = [price_sets(hulls, loss, calibration)[:, label] for label, calibration in enumerate(calibrations)]
    return torch.stack(columns, dim=1)


def subset(hulls: Hulls, keep: Tensor) -> Hulls:
    """The hulls of some of the samples (N,), numbered anew."""
    number = keep.long().cumsum(0) - 1
    chosen = keep[hulls.sample]
    return Hulls(
        sample=number[hulls.sample[chosen]],
        price=hulls.price[chosen],
        until=hulls.until[chosen],
        level=hulls.level[chosen],
        value=hulls.value[chosen],
        action=hulls.action[chosen],
        quantile=hulls.quantile[chosen],
        n_samples=int(keep.sum()),
    )
