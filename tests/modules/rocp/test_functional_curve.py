"""Curves, hulls and calibration against literal definitions in exact arithmetic, written independently of the code.

The literal side knows nothing of hulls, events or intervals: it looks at every price and every candidate label. With
probabilities i/D every level and every price is rational, so there is no tolerance in it.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from fulgurite.modules.rocp.functional import minimax_action, required_rank, robust_risk
from fulgurite.modules.rocp.functional_curve import (
    calibrate,
    calibrate_labels,
    calibrated_sets,
    coverage_steps,
    curve_points,
    price_sets,
    selected_action,
    selector_hulls,
    subset,
)

CURVES = ("rocp", "rac")
MODES = ("exact", "plus", "global")
EXAMPLE = [[0, 4, 6], [12, 1, 5], [20, 9, 2]]


def members_of(hulls, loss):
    """The set (M, K) of each vertex: the labels whose loss under its action does not exceed its quantile."""
    return loss.T[hulls.action] <= hulls.quantile[:, None]


def calibrated_price_sets(hulls, labels, test, loss, alpha, mode="exact", class_conditional=False):
    """Calibrate and predict in one step: the sets and the calibrations."""
    calibrations = calibrate_labels(hulls, labels, loss, alpha, mode, class_conditional)
    return calibrated_sets(test, loss, calibrations), calibrations


# --- The literal side ------------------------------------------------------------------------------------------------


def quantile(p, column, t):
    """The smallest loss v with P(loss <= v) >= t."""
    return min(v for v in column if sum(q for q, w in zip(p, column, strict=True) if w <= v) >= t)


def curve_at(p, loss, t, curve):
    """V(p, t), its action and its set, by definition; works for integers, fractions and floats alike."""
    n_labels, n_actions = len(loss), len(loss[0])
    columns = [[loss[y][a] for y in range(n_labels)] for a in range(n_actions)]
    theta = [quantile(p, column, t) for column in columns]
    values = [
        t * theta[a] + (1 - t) * max(columns[a]) if curve == "rocp" else Fraction(theta[a]) for a in range(n_actions)
    ]
    action = values.index(min(values))
    members = [(curve == "rocp" and t == 0) or loss[y][action] <= theta[action] for y in range(n_labels)]
    return values[action], action, members


def levels_of(p, loss):
    """All levels at which a quantile can jump, 0 and 1."""
    found = {Fraction(0), Fraction(1)}
    for column in zip(*loss, strict=True):
        found |= {sum((q for q, w in zip(p, column, strict=True) if w <= v), Fraction(0)) for v in column}
    return sorted(found)


class Literal:
    """Sets of some points at every price that can matter to any of them."""

    def __init__(self, rows, loss, curve, levels=None):
        self.points = []
        prices = {Fraction(0)}
        for p in rows:
            grid = levels_of(p, loss) if levels is None else levels
            points = [(t, *curve_at(p, loss, t, curve)) for t in grid]
            self.points.append(points)
            prices |= {(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[1] > a[1]}
        self.prices = sorted(prices)
        self.chosen = [self._choose(points) for points in self.points]
        self.sets = np.array(
            [[points[j][3] for j in row] for points, row in zip(self.points, self.chosen, strict=True)]
        )

    def _choose(self, points):
        """argmin V - beta t at every price, ties to the largest t; exact in whole numbers."""
        scale = np.lcm.reduce([int(t.denominator) for t, *_ in points] + [int(v.denominator) for _, v, *_ in points])
        level = np.array([int(t * int(scale)) for t, *_ in points])[::-1]
        value = np.array([int(v * int(scale)) for _, v, *_ in points])[::-1]
        above = np.array([beta.numerator for beta in self.prices])
        below = np.array([beta.denominator for beta in self.prices])
        objective = below[:, None] * value - above[:, None] * level
        assert np.abs(below.astype(float)).max() * np.abs(value.astype(float)).max() < 2**62
        assert np.abs(above.astype(float)).max() * np.abs(level.astype(float)).max() < 2**62
        return len(level) - 1 - objective.argmin(1)


def literal_sets(literal, labels, n_test, alpha, mode, conditional=False):
    """Algorithm 1 as it is written: for every test point, for every candidate label, for every price.

    The first len(labels) points are the calibration points.
    """
    n, n_labels = len(labels), literal.sets.shape[2]
    covered = np.array([literal.sets[i, :, y] for i, y in enumerate(labels)])  # (n, prices)
    result = np.zeros((n_test, n_labels), bool)
    for x, y in itertools.product(range(n_test), range(n_labels)):
        own = [i for i in range(n) if not conditional or labels[i] == y]
        counts = covered[own].sum(0)
        result[x, y] = True  # where no price is enough
        for step in range(len(literal.prices)):
            inside = bool(literal.sets[n + x, step, y])
            if mode == "exact":
                enough = int(counts[step]) + inside >= (1 - alpha) * (len(own) + 1)
            elif mode == "plus":
                enough = int(counts[step]) >= (1 - alpha) * (len(own) + 1)
            else:
                enough = int(counts[step]) >= (1 - alpha) * len(own)
            if enough:
                result[x, y] = inside
                break
    return result, covered.sum(0)


def fast_sets(p, labels, loss, alpha, curve, mode, conditional=False):
    loss = torch.tensor(loss, dtype=torch.float64)
    n = len(labels)
    p = torch.tensor(p, dtype=torch.float64)
    hulls, test = selector_hulls(p[:n], loss, curve), selector_hulls(p[n:], loss, curve)
    sets, calibrations = calibrated_price_sets(
        hulls, torch.tensor(labels), test, loss, float(alpha), mode, class_conditional=conditional
    )
    return sets.numpy(), calibrations


# --- Random problems -------------------------------------------------------------------------------------------------


def rational_problem(seed, n_test=3):
    """Whole-number losses with ties, probabilities i/20 or i/12 with zeros and duplicated rows; n = 3..11."""
    rng = np.random.default_rng([20260, seed])
    n = 3 + seed % 9
    n_labels, n_actions = int(rng.integers(2, 5)), int(rng.integers(1, 5))
    if seed % 3 == 0:
        loss = rng.integers(0, rng.choice([2, 4, 9]), (n_labels, n_actions)).tolist()
    else:  # actions with about the same losses for different labels: their sets are far from nested
        n_labels, n_actions = int(rng.integers(3, 5)), int(rng.integers(2, 6))
        steps = np.array([0, 1, 4, 9] if seed % 3 == 1 else [0, 2, 4, 6])[:n_labels]
        loss = rng.permuted(np.tile(steps[:, None], (1, n_actions)), axis=0)
        loss = (loss + (seed % 3 - 1) * rng.integers(0, 3, (1, n_actions))).tolist()
    denominator = int(rng.choice([12, 20]))
    weights = rng.dirichlet(np.full(n_labels, rng.choice([0.4, 1.0, 3.0])), n + n_test)
    whole = np.array([rng.multinomial(denominator, w) for w in weights])
    copies = rng.random(n + n_test) < 0.3
    whole[copies] = whole[rng.integers(0, n + n_test, int(copies.sum()))]
    follow = rng.random(n) < rng.choice([0.2, 0.8])  # labels from the probabilities, or from nowhere
    labels = [
        int(rng.choice(n_labels, p=row / denominator)) if true else int(rng.integers(n_labels))
        for row, true in zip(whole[:n], follow, strict=True)
    ]
    alpha = Fraction(int(rng.choice([1, 2, 3, 4, 5])), 10) if seed % 5 else Fraction(1, 4)
    return whole, denominator, labels, loss, alpha


PROBLEMS = range(100, 280)  # a window with enough non-nested ones for both curves


@pytest.fixture(scope="module")
def problems():
    """Every random problem with its literal sides (built once: it is most of the time of this file)."""
    found = []
    for seed in PROBLEMS:
        whole, denominator, labels, loss, alpha = rational_problem(seed)
        rows = [[Fraction(int(w), denominator) for w in row] for row in whole]
        # Half of them look at every level of the grid i/D, not only at the candidates.
        levels = [Fraction(i, denominator) for i in range(denominator + 1)] if seed % 2 else None
        literals = {curve: Literal(rows, loss, curve, levels) for curve in CURVES}
        found.append((whole / denominator, labels, loss, alpha, literals))
    return found


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("curve", CURVES)
def test_calibration_equals_the_literal_loop_over_labels_and_prices(problems, curve, mode, conditional):
    falling = compared = between = 0
    for number, (p, labels, loss, alpha, literals) in enumerate(problems):
        if conditional and len(set(labels)) < len(loss):
            continue
        n_test = len(p) - len(labels)
        expected, counts = literal_sets(literals[curve], labels, n_test, alpha, mode, conditional)
        got, _ = fast_sets(p, labels, loss, alpha, curve, mode, conditional)
        np.testing.assert_array_equal(got, expected, err_msg=f"problem {number}")
        falling += (np.diff(counts) < 0).any()
        compared += 1
        between += 0 < expected.sum() < expected.size
    assert compared >= (60 if conditional else 150)
    assert between >= compared // 5, "most sets are all labels: the comparison says little"
    if not conditional:
        assert falling >= 5, "no coverage that falls with the price: bisection would pass"


@pytest.mark.parametrize("curve", CURVES)
def test_the_coverage_steps_price_and_intervals_equal_the_literal_ones(problems, curve):
    for p, labels, loss, alpha, literals in problems:
        literal = literals[curve]
        counts = sum(literal.sets[i, :, y].astype(int) for i, y in enumerate(labels))
        _, (calibration,) = fast_sets(p, labels, loss, alpha, curve, "exact")
        prices = np.array([float(beta) for beta in literal.prices])
        changed = np.concatenate([[True], np.diff(counts) != 0])
        np.testing.assert_allclose(calibration.breakpoints, prices[changed], rtol=1e-9)
        np.testing.assert_array_equal(calibration.counts, counts[changed])
        rank = -((alpha - 1) * (len(labels) + 1) // 1)
        assert calibration.rank == rank
        enough = np.flatnonzero(counts >= rank)
        assert calibration.price == pytest.approx(prices[enough[0]] if len(enough) else np.inf, rel=1e-9)
        below = np.arange(len(prices)) < (enough[0] if len(enough) else len(prices))
        short = (counts == rank - 1) & below
        intervals = list(zip(calibration.low.tolist(), calibration.high.tolist(), strict=True))
        inside = [any(low <= beta < high for low, high in intervals) for beta in prices * (1 + 1e-12)]
        np.testing.assert_array_equal(inside, short)


@pytest.mark.parametrize("curve", CURVES)
def test_the_action_of_the_selected_vertex_equals_the_literal_one(problems, curve):
    for p, labels, loss, alpha, literals in problems:
        literal = literals[curve]
        _, (calibration,) = fast_sets(p, labels, loss, alpha, curve, "exact")
        matrix = torch.tensor(loss, dtype=torch.float64)
        got = selected_action(selector_hulls(torch.tensor(p), matrix, curve), calibration.price)
        counts = sum(literal.sets[i, :, y].astype(int) for i, y in enumerate(labels))
        enough = np.flatnonzero(counts >= (1 - alpha) * (len(labels) + 1))
        step = enough[0] if len(enough) else len(literal.prices) - 1
        expected = [points[row[step]][2] for points, row in zip(literal.points, literal.chosen, strict=True)]
        assert got.tolist() == expected


@pytest.mark.parametrize("curve", CURVES)
def test_calibration_equals_the_literal_loop_on_problems_without_ties(curve):
    """Random floats, dyadic so that the literal side is exact too."""
    size = 2**20
    for seed in range(16):
        rng = np.random.default_rng([7, seed])
        n, n_test, n_labels, n_actions = int(rng.integers(3, 12)), 2, int(rng.integers(2, 5)), int(rng.integers(2, 4))
        whole = np.array([rng.multinomial(size, rng.dirichlet(np.ones(n_labels))) for _ in range(n + n_test)])
        loss = rng.integers(0, 5000, (n_labels, n_actions))
        labels = rng.integers(0, n_labels, n).tolist()
        alpha = Fraction(int(rng.integers(1, 5)), 10)
        rows = [[Fraction(int(w), size) for w in row] for row in whole]
        literal = Literal(rows, loss.tolist(), curve)
        for mode in MODES:
            expected, _ = literal_sets(literal, labels, n_test, alpha, mode)
            got, _ = fast_sets(whole / size, labels, loss / 512, alpha, curve, mode)
            np.testing.assert_array_equal(got, expected, err_msg=f"problem {seed} {mode}")


@pytest.mark.parametrize("curve", CURVES)
def test_exact_contains_plus_and_equals_it_where_coverage_rises_and_sets_are_nested(problems, curve):
    larger = equal = 0
    for p, labels, loss, alpha, literals in problems:
        exact, (calibration,) = fast_sets(p, labels, loss, alpha, curve, "exact")
        plus, _ = fast_sets(p, labels, loss, alpha, curve, "plus")
        assert (exact >= plus).all()
        nested = (literals[curve].sets[:, 1:] >= literals[curve].sets[:, :-1]).all()
        if nested:
            assert (calibration.counts.diff() >= 0).all()
            np.testing.assert_array_equal(exact, plus)
            equal += 1
        larger += (exact != plus).any()
    assert equal >= 30
    if curve == "rocp":
        assert larger >= 3


# --- Curves and hulls ------------------------------------------------------------------------------------------------


def float_problem(seed):
    rng = np.random.default_rng([3, seed])
    n_labels, n_actions = int(rng.integers(2, 6)), int(rng.integers(1, 5))
    p = rng.dirichlet(np.full(n_labels, rng.choice([0.3, 1.0])), 6)
    loss = rng.exponential(3, (n_labels, n_actions)) if seed % 2 else rng.integers(0, 6, (n_labels, n_actions)) * 1.0
    return p, loss


def dense_values(p, loss, curve, grid):
    """V on a grid of levels in (0, 1], straight from the definition of the quantile."""
    values = np.full((loss.shape[1], len(grid)), np.inf)
    for a, column in enumerate(loss.T):
        order = np.argsort(column, kind="stable")
        cumulated = np.cumsum(p[order])
        cumulated[-1] = 1
        theta = column[order][np.searchsorted(cumulated, grid - 1e-11)]
        values[a] = grid * theta + (1 - grid) * column.max() if curve == "rocp" else theta
    return values.min(0)


def lower_hull(points):
    """Andrew's monotone chain."""
    hull = []
    for x, y in sorted(points):
        while len(hull) >= 2 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return np.array(hull)


@pytest.mark.parametrize("curve", CURVES)
def test_vertices_are_the_lower_hull_of_the_curve_taken_densely(curve):
    for seed in range(30):
        p, loss = float_problem(seed)
        hulls = selector_hulls(torch.tensor(p), torch.tensor(loss), curve)
        for i, row in enumerate(p):
            own = (hulls.sample == i).numpy()
            level, value = hulls.level[own].numpy(), hulls.value[own].numpy()
            ends = [row[loss[:, a] <= v].sum() for a in range(loss.shape[1]) for v in loss[:, a]]
            grid = np.unique(np.concatenate([np.linspace(1e-4, 1, 700), np.minimum(ends, 1)]))
            grid = grid[grid > 1e-9]
            dense = dense_values(row, loss, curve, grid)
            start = (0.0, loss.max(0).min() if curve == "rocp" else loss.min())
            hull = lower_hull([start, *zip(grid, dense, strict=True)])
            # No dense point lies below the polygon of the vertices, from the first of them on.
            assert (dense >= np.interp(grid, level, value) - 1e-9)[grid >= level[0]].all()
            assert min(dense.min(), start[1]) == pytest.approx(value[0], abs=1e-9)
            # Every vertex lies on the dense hull, and the dense hull on the polygon.
            np.testing.assert_allclose(np.interp(level, hull[:, 0], hull[:, 1]), value, atol=1e-9)
            right = hull[hull[:, 0] >= level[0]]
            np.testing.assert_allclose(np.interp(right[:, 0], level, value), right[:, 1], atol=1e-9)
            slopes = np.diff(value) / np.diff(level)
            assert (np.diff(slopes) > 0).all()
            np.testing.assert_allclose(hulls.price[own][1:], slopes, rtol=1e-7)


@pytest.mark.parametrize("curve", CURVES)
def test_a_price_selects_the_largest_level_of_least_cost(curve):
    rng = np.random.default_rng(11)
    for seed in range(30):
        p, loss = float_problem(seed)
        hulls = selector_hulls(torch.tensor(p), torch.tensor(loss), curve)
        for i, beta in itertools.product(range(len(p)), rng.exponential(4, 5)):
            at = ((hulls.sample == i) & (hulls.price <= beta) & (beta < hulls.until)).nonzero().flatten()
            assert len(at) == 1, "exactly one vertex at every price"
            ends = [p[i][loss[:, a] <= v].sum() for a in range(loss.shape[1]) for v in loss[:, a]]
            grid = np.unique(np.concatenate([np.linspace(1e-3, 1, 300), np.minimum(ends, 1)]))
            costs = dense_values(p[i], loss, curve, grid) - beta * grid
            assert (hulls.value[at] - beta * hulls.level[at]).item() <= costs.min() + 1e-9


@pytest.mark.parametrize("curve", CURVES)
def test_levels_and_prices_of_a_sample_rise_and_its_last_vertex_covers_all_that_is_possible(curve):
    for seed in range(60):
        p, loss = float_problem(seed)
        p = np.concatenate([p, np.eye(p.shape[1]), np.full((1, p.shape[1]), 1 / p.shape[1])])
        matrix = torch.tensor(loss)
        hulls = selector_hulls(torch.tensor(p), matrix, curve)
        assert sorted(set(hulls.sample.tolist())) == list(range(len(p)))
        members = members_of(hulls, matrix)
        for i, row in enumerate(p):
            own = hulls.sample == i
            assert hulls.price[own][0] == 0
            assert hulls.until[own][-1] == torch.inf
            assert (hulls.level[own].diff() > 0).all()
            assert (hulls.price[own].diff() > 0).all()
            assert torch.equal(hulls.price[own][1:], hulls.until[own][:-1])
            assert (hulls.value[own].diff() >= 0).all()
            assert hulls.level[own][-1] == pytest.approx(1, abs=1e-11)
            assert members[own][-1][torch.tensor(row > 1e-9)].all()
            held = (members[own] * torch.tensor(row)).sum(1)
            assert (held >= hulls.level[own] - 1e-9).all(), "the set holds the level that it was chosen for"


def test_the_set_at_level_zero_is_all_labels_for_rocp_and_the_best_loss_for_rac():
    loss = torch.tensor(EXAMPLE, dtype=torch.float64)
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    level, value, action, theta = curve_points(p, loss, "rocp")
    assert (level[0, 0], value[0, 0], action[0], theta[0]) == (0, 6, 2, 6)
    assert (loss[:, 2] <= theta[0]).all()
    level, value, action, theta = curve_points(p, loss, "rac")
    assert (level[0, 0], value[0, 0], action[0], theta[0]) == (0, 0, 0, 0)


def test_the_curve_of_the_worked_example():
    p = [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)]
    expected = {
        0: (6.0, 2, 6),
        0.1: (5.6, 2, 2),
        0.2: (5.8, 2, 5),
        0.3: (5.7, 2, 5),
        0.7: (5.5, 1, 4),
        0.9: (4.5, 1, 4),
        1: (6.0, 2, 6),
    }
    for t, (value, action, theta) in expected.items():
        literal = curve_at(p, EXAMPLE, Fraction(str(t)), "rocp")
        assert (float(literal[0]), literal[1]) == (value, action)
        assert literal[2] == [t == 0 or row[action] <= theta for row in EXAMPLE]
    loss = torch.tensor(EXAMPLE, dtype=torch.float64)
    level, value, action, theta = curve_points(torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64), loss, "rocp")
    points = list(zip(level[0].tolist(), value[0].tolist(), action.tolist(), theta.tolist(), strict=True))
    for t in (0, 0.1, 0.3, 0.9, 1):  # the other two lie inside a plateau of the action's quantile, so on no hull
        assert min(point[1:] for point in points if abs(point[0] - t) < 1e-12) == pytest.approx(expected[t])


def test_the_hull_of_the_worked_example():
    loss = torch.tensor(EXAMPLE, dtype=torch.float64)
    hulls = selector_hulls(torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64), loss)
    np.testing.assert_allclose(hulls.price, [0, 15])
    np.testing.assert_allclose(hulls.until, [15, np.inf])
    np.testing.assert_allclose(hulls.level, [0.9, 1])
    np.testing.assert_allclose(hulls.value, [4.5, 6])
    assert hulls.action.tolist() == [1, 2]
    assert hulls.quantile.tolist() == [4, 6]
    assert members_of(hulls, loss).tolist() == [[True, True, False], [True, True, True]]
    assert selected_action(hulls, 0.0).tolist() == [1]
    assert selected_action(hulls, 14.9).tolist() == [1]
    assert selected_action(hulls, torch.inf).tolist() == [2]


def test_cumulated_probabilities_are_compared_with_a_tolerance():
    """0.1 + 0.2 against 0.3: both actions reach level 0.3 with the same labels, listed in opposite orders."""
    loss = torch.tensor([[0.0, 2, 1], [1, 1, 2], [2, 0, 0], [9, 9, 9]], dtype=torch.float64)
    exact = [[0, 2, 1], [1, 1, 2], [2, 0, 0], [9, 9, 9]]
    for tenths in set(itertools.permutations((1, 2, 3, 4))):
        p = torch.tensor([[i / 10 for i in tenths]], dtype=torch.float64)
        literal = Literal([[Fraction(i, 10) for i in tenths]], exact, "rocp")
        hulls = selector_hulls(p, loss)
        for step, beta in enumerate(literal.prices):
            price = float(beta) * (1 + 1e-12)
            at = (hulls.price <= price) & (price < hulls.until)
            assert torch.equal(members_of(hulls, loss)[at][0], torch.tensor(literal.sets[0, step])), (tenths, beta)


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_zero_one_loss_gives_the_most_probable_label_until_its_odds_are_the_price():
    """V = 1 - t up to t = max p with the set {top}, and V(1) = 1 with all labels: the price is p / (1 - p)."""
    loss = 1 - torch.eye(3, dtype=torch.float64)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]], dtype=torch.float64)
    hulls = selector_hulls(p, loss)
    np.testing.assert_allclose(hulls.price.reshape(4, 2), [[0, 1], [0, 1.5], [0, 4], [0, 2 / 3]])
    np.testing.assert_allclose(hulls.level.reshape(4, 2), [[0.5, 1], [0.6, 1], [0.8, 1], [0.4, 1]])
    assert members_of(hulls, loss).int().tolist() == [
        [1, 0, 0], [1, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 1, 1], [1, 0, 0], [1, 1, 1],
    ]  # fmt: skip
    assert hulls.action[::2].tolist() == [0, 1, 2, 0]


def test_zero_one_loss_is_calibrated_as_by_hand():
    """Points 0 and 2 are right at any price, 1 from 1.5 on, 3 from 2/3 on: c = 2, 3, 4 from 0, 2/3, 1.5."""
    loss = 1 - torch.eye(3, dtype=torch.float64)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 2, 1])
    calibration = calibrate(selector_hulls(p, loss), labels, loss, 0.4)
    assert calibration.rank == 3
    np.testing.assert_allclose(calibration.breakpoints, [0, 2 / 3, 1.5])
    assert calibration.counts.tolist() == [2, 3, 4]
    assert calibration.price == pytest.approx(2 / 3)
    np.testing.assert_allclose([calibration.low.tolist(), calibration.high.tolist()], [[0], [2 / 3]])
    # Odds below the price 2/3 give all labels, of 2/3 too; above it only the top label.
    test = torch.tensor([[0.35, 0.33, 0.32], [0.4, 0.3, 0.3], [0.42, 0.3, 0.28], [0.1, 0.2, 0.7]], dtype=torch.float64)
    sets = price_sets(selector_hulls(test, loss), loss, calibration)
    assert sets.int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("curve", CURVES)
def test_the_action_at_a_price_does_not_hang_on_its_last_bits(curve):
    loss = torch.tensor([[0.0, 1], [2, 3], [1, 0]], dtype=torch.float64)
    for a, b in itertools.product(range(1, 11), repeat=2):
        if a + b < 12:
            hulls = selector_hulls(
                torch.tensor([[a / 12, b / 12, (12 - a - b) / 12]], dtype=torch.float64), loss, curve
            )
            for price, action in zip(hulls.price[1:].tolist(), hulls.action[1:].tolist(), strict=True):
                for last_bits in (-1e-14, 1e-14):
                    assert selected_action(hulls, price * (1 + last_bits)).tolist() == [action]


@pytest.mark.parametrize("curve", CURVES)
def test_too_few_calibration_points_give_all_labels(curve):
    loss = torch.tensor(EXAMPLE, dtype=torch.float64)
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(3), 30))
    test = selector_hulls(p, loss, curve)
    calibration = calibrate(subset(test, torch.arange(30) < 8), p[:8].argmax(1), loss, 0.1)
    assert (calibration.rank, calibration.price) == (9, torch.inf)
    assert price_sets(test, loss, calibration).all()


def test_a_label_that_is_never_covered_gives_all_labels():
    """Probability zero for the true label throughout, and an action without risk: no price is enough."""
    loss = torch.tensor([[0.0, 9], [5, 9]], dtype=torch.float64)
    p = torch.tensor([[1.0, 0]], dtype=torch.float64)
    calibration = calibrate(selector_hulls(p.expand(20, 2), loss), torch.ones(20, dtype=torch.long), loss, 0.2)
    assert calibration.price == torch.inf
    assert price_sets(selector_hulls(p, loss), loss, calibration).all()


def test_labels_are_added_at_prices_where_the_count_is_one_short():
    """Non-nested sets: exact holds a label that the set at beta_A lacks."""
    for seed in PROBLEMS:
        whole, denominator, labels, loss, alpha = rational_problem(seed)
        exact, (calibration,) = fast_sets(whole / denominator, labels, loss, alpha, "rocp", "exact")
        plus, _ = fast_sets(whole / denominator, labels, loss, alpha, "rocp", "plus")
        if (exact != plus).any():
            assert len(calibration.low)
            assert (calibration.high <= calibration.price).all()
            return
    pytest.fail("no problem tells the modes apart")


# --- Invariances -----------------------------------------------------------------------------------------------------


def sets_and_actions(p, labels, loss, curve, alpha=0.2, n_test=20):
    p, loss, labels = torch.as_tensor(p), torch.as_tensor(loss), torch.as_tensor(labels)
    hulls, test = selector_hulls(p[n_test:], loss, curve), selector_hulls(p[:n_test], loss, curve)
    sets, _ = calibrated_price_sets(hulls, labels, test, loss, alpha)
    return sets, minimax_action(sets, loss, alpha), robust_risk(sets, loss, alpha)


def invariance_problem(seed, rational):
    rng = np.random.default_rng([9, seed])
    p = rng.dirichlet(np.ones(4), 60)
    if rational:
        p = np.array([rng.multinomial(20, row) for row in p]) / 20
        loss = rng.integers(0, 12, (4, 3)) * 1.0
    else:
        loss = rng.exponential(3, (4, 3))
    return p, rng.integers(0, 4, 40), loss


@pytest.mark.parametrize("rational", [True, False])
@pytest.mark.parametrize("curve", CURVES)
def test_the_unit_and_the_zero_of_the_loss_change_no_set_and_no_action(curve, rational):
    for seed in range(8):
        p, labels, loss = invariance_problem(seed, rational)
        sets, actions, _ = sets_and_actions(p, labels, loss, curve)
        for other in (loss * 1e-6, loss / 3, loss * 7, loss * 1e9, loss + 0.3, loss + 100):
            changed = sets_and_actions(p, labels, other, curve)
            assert torch.equal(changed[0], sets)
            assert torch.equal(changed[1], actions)


@pytest.mark.parametrize("rational", [True, False])
@pytest.mark.parametrize("curve", CURVES)
def test_permuting_labels_permutes_the_sets(curve, rational):
    order = [2, 0, 3, 1]
    for seed in range(12):
        p, labels, loss = invariance_problem(seed, rational)
        sets, actions, risks = sets_and_actions(p, labels, loss, curve)
        renamed = np.argsort(order)[labels]
        changed = sets_and_actions(p[:, order], renamed, loss[order], curve)
        assert torch.equal(changed[0], sets[:, order])
        assert torch.equal(changed[1], actions)
        torch.testing.assert_close(changed[2], risks)


@pytest.mark.parametrize("curve", CURVES)
def test_permuting_actions_permutes_the_actions(curve):
    order = [1, 2, 0]
    for seed in range(12):
        p, labels, loss = invariance_problem(seed, rational=False)
        sets, actions, risks = sets_and_actions(p, labels, loss, curve)
        changed = sets_and_actions(p, labels, loss[:, order], curve)
        assert torch.equal(changed[0], sets)
        assert torch.equal(torch.tensor(order)[changed[1]], actions)
        torch.testing.assert_close(changed[2], risks[:, order])


@pytest.mark.parametrize("curve", CURVES)
def test_the_order_of_calibration_points_and_the_batches_do_not_matter(curve, monkeypatch):
    for seed in range(6):
        p, labels, loss = invariance_problem(seed, rational=True)
        sets, _, _ = sets_and_actions(p, labels, loss, curve)
        order = np.random.default_rng(seed).permutation(40)
        shuffled = np.concatenate([p[:20], p[20:][order]])
        assert torch.equal(sets_and_actions(shuffled, labels[order], loss, curve)[0], sets)
    whole = selector_hulls(torch.tensor(p), torch.tensor(loss), curve)
    monkeypatch.setattr("fulgurite.modules.rocp.functional_curve.CHUNK_ELEMENTS", 50)
    parts = selector_hulls(torch.tensor(p), torch.tensor(loss), curve)
    for name in ("sample", "price", "until", "level", "value", "action", "quantile"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


def test_one_prohibitive_loss_does_not_blur_the_others():
    """Tolerances are relative to the largest loss; 1e12 for "never do this" must not make a loss of 0.5 equal to 0."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
    small = torch.tensor([[0.0, 3], [0.5, 2], [3, 1]], dtype=torch.float64)
    large = torch.cat([small, torch.full((3, 1), 1e12, dtype=torch.float64)], 1)
    for curve in CURVES:
        without, with_it = selector_hulls(p, small, curve), selector_hulls(p, large, curve)
        assert torch.equal(members_of(with_it, large), members_of(without, small))


# --- Parts and bad input ---------------------------------------------------------------------------------------------


def test_coverage_steps_merge_prices_that_differ_in_the_last_bits():
    loss = 1 - torch.eye(2, dtype=torch.float64)
    p = torch.tensor([[0.6, 0.4], [0.6000000000000001, 0.3999999999999999]], dtype=torch.float64)
    hulls = selector_hulls(p, loss)
    covered = torch.tensor([True, False, False, True])
    breakpoints, counts = coverage_steps(hulls, covered)
    assert breakpoints.tolist() == [0]
    assert counts.tolist() == [1]


def test_subsets_of_hulls_are_those_of_the_subset():
    p, _, loss = invariance_problem(0, rational=False)
    keep = torch.tensor(np.random.default_rng(0).random(60) < 0.4)
    got = subset(selector_hulls(torch.tensor(p), torch.tensor(loss)), keep)
    expected = selector_hulls(torch.tensor(p)[keep], torch.tensor(loss))
    assert got.n_samples == expected.n_samples == int(keep.sum())
    for name in ("sample", "price", "until", "level", "value", "action", "quantile"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_no_test_samples_give_no_sets():
    loss = torch.tensor(EXAMPLE, dtype=torch.float64)
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(3), 20))
    calibration = calibrate(selector_hulls(p, loss), p.argmax(1), loss, 0.2)
    empty = selector_hulls(p[:0], loss)
    assert price_sets(empty, loss, calibration).shape == (0, 3)
    assert selected_action(empty, 1.0).shape == (0,)


def test_a_loss_without_differences_and_one_action_are_no_special_case():
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(3), 20))
    for loss in (torch.zeros(3, 2), torch.ones(3, 2), torch.tensor([[1.0], [2], [3]])):
        loss = loss.double()
        for curve in CURVES:
            hulls = selector_hulls(p, loss, curve)
            sets, _ = calibrated_price_sets(hulls, p.argmax(1), hulls, loss, 0.2)
            assert sets.any(1).all()
            if len(loss.unique()) == 1:
                assert sets.all()


def test_bad_arguments_are_refused():
    loss = torch.tensor(EXAMPLE, dtype=torch.float64)
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(3), 6))
    hulls = selector_hulls(p, loss)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(ValueError, match="calibration set is empty"):
        calibrate(selector_hulls(p[:0], loss), labels[:0], loss, 0.1)
    with pytest.raises(ValueError, match="alpha is 0"):
        calibrate(hulls, labels, loss, 0)
    with pytest.raises(ValueError, match="labels run from 0 to 3"):
        calibrate(hulls, labels + (labels == 2), loss, 0.1)
    with pytest.raises(ValueError, match=r"no sample of the labels \[2\]"):
        calibrated_price_sets(hulls, labels % 2, hulls, loss, 0.1, class_conditional=True)
    with pytest.raises(ValueError, match="rows are true labels, columns are actions"):
        selector_hulls(p, loss[:2])
    with pytest.raises(ValueError, match="losses are at least 0"):
        selector_hulls(p, loss - 1)
    with pytest.raises(ValueError, match="sum to"):
        selector_hulls(p * 2, loss)


# --- Stored vectors --------------------------------------------------------------------------------------------------


@pytest.mark.reference
def test_sets_prices_intervals_actions_and_risks_equal_the_stored_ones(reference_folder):
    vectors = np.load(reference_folder("rocp") / "rocp_reference.npz")
    cases = sorted(key.removeprefix("loss_") for key in vectors if key.startswith("loss_"))
    assert cases
    p, p_test = torch.tensor(vectors["P_cal"]), torch.tensor(vectors["P_test"])
    labels = torch.tensor(vectors["y_cal"])
    for case in cases:
        loss, alpha = torch.tensor(vectors[f"loss_{case}"]), float(case.split("_")[-1])
        hulls, test = selector_hulls(p, loss), selector_hulls(p_test, loss)
        sets, (exact,) = calibrated_price_sets(hulls, labels, test, loss, alpha)
        np.testing.assert_array_equal(sets, vectors[f"rocp_exact_{case}"])
        assert exact.rank == vectors[f"rocp_k_{case}"] == required_rank(len(p), alpha)
        np.testing.assert_allclose(exact.price, vectors[f"rocp_betaA_{case}"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(
            torch.stack([exact.low, exact.high], 1), vectors[f"rocp_E_{case}"], rtol=0, atol=1e-9
        )
        np.testing.assert_allclose(robust_risk(sets, loss, alpha), vectors[f"robust_risk_{case}"], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(minimax_action(sets, loss, alpha), vectors[f"action_{case}"])

        loose, (single,) = calibrated_price_sets(hulls, labels, test, loss, alpha, "global")
        np.testing.assert_array_equal(loose, vectors[f"rocp_global_{case}"])
        np.testing.assert_allclose(single.price, vectors[f"rocp_beta_global_{case}"], rtol=0, atol=1e-9)

        rac, _ = calibrated_price_sets(
            selector_hulls(p, loss, "rac"), labels, selector_hulls(p_test, loss, "rac"), loss, alpha
        )
        np.testing.assert_array_equal(rac, vectors[f"rac_exact_{case}"])
