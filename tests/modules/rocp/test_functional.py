"""Robust risk and actions: against linear programming, by hand, and on bad input."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from fulgurite.modules.rocp.functional import (
    best_response,
    check_alpha,
    check_labels,
    check_loss,
    check_probabilities,
    minimax_action,
    required_rank,
    robust_risk,
    smallest_index_of_minimum,
)

EXAMPLE = torch.tensor([[0.0, 4, 6], [12, 1, 5], [20, 9, 2]])


def all_sets(n_labels, empty=False):
    rows = list(itertools.product([False, True], repeat=n_labels))
    return torch.tensor(rows if empty else [row for row in rows if any(row)])


def worst_law(loss, members, alpha):
    """The largest expected loss over laws that put at least 1 - alpha on the members."""
    solved = linprog(
        -np.asarray(loss),
        A_ub=-np.asarray(members, float)[None],
        b_ub=[-(1 - alpha)],
        A_eq=np.ones((1, len(loss))),
        b_eq=[1],
        bounds=(0, 1),
        method="highs",
    )
    assert solved.success
    return -solved.fun


@pytest.mark.parametrize("alpha", [0, 0.05, 0.5, 1])
@pytest.mark.parametrize(("n_labels", "n_actions"), [(2, 3), (3, 4), (4, 2)])
def test_robust_risk_is_the_value_of_the_linear_programme(n_labels, n_actions, alpha):
    rng = np.random.default_rng([n_labels, n_actions])
    for loss in (rng.exponential(5, (n_labels, n_actions)), rng.integers(0, 4, (n_labels, n_actions)).astype(float)):
        sets = all_sets(n_labels)
        expected = [[worst_law(column, members, alpha) for column in loss.T] for members in sets]
        np.testing.assert_allclose(robust_risk(sets, torch.tensor(loss), alpha), expected, rtol=0, atol=1e-9)


def test_without_miscoverage_the_rule_is_max_min():
    loss = np.random.default_rng(1).random((5, 4))
    sets = all_sets(5)
    inside = np.array([[max(loss[y, a] for y in range(5) if c[y]) for a in range(4)] for c in sets.tolist()])
    np.testing.assert_array_equal(robust_risk(sets, torch.tensor(loss), 0), inside)
    np.testing.assert_array_equal(minimax_action(sets, torch.tensor(loss), 0), inside.argmin(1))


def test_the_set_of_all_labels_and_the_empty_set_plan_for_the_worst_label_at_any_alpha():
    loss = torch.rand(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sets = torch.tensor([[True] * 4, [False] * 4])
    for alpha in (0, 0.05, 0.5, 1):
        assert torch.equal(robust_risk(sets, loss, alpha), loss.max(0).values.expand(2, 3))


def test_with_all_miscoverage_the_set_is_ignored():
    loss = torch.rand(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sets = all_sets(4, empty=True)
    torch.testing.assert_close(robust_risk(sets, loss, 1), loss.max(0).values.expand(len(sets), 3))


def test_robust_risk_rises_with_alpha_and_does_not_touch_its_sets():
    loss = torch.rand(4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sets = all_sets(4, empty=True)
    before = sets.clone()
    risks = torch.stack([robust_risk(sets, loss, alpha) for alpha in np.linspace(0, 1, 11)])
    assert (risks.diff(dim=0) >= -1e-15).all()
    assert torch.equal(sets, before)


@pytest.mark.parametrize(
    ("members", "alpha", "risks", "action"),
    [
        ([1, 0, 0], 0.0, (0, 4, 6), 0),
        ([1, 0, 0], 0.1, (2, 4.5, 6), 0),
        ([1, 0, 0], 0.3, (6, 5.5, 6), 1),
        ([1, 1, 0], 0.1, (12.8, 4.5, 6), 1),
        ([1, 1, 1], 0.0, (20, 9, 6), 2),
        ([1, 1, 1], 0.1, (20, 9, 6), 2),
        ([1, 1, 1], 1.0, (20, 9, 6), 2),
        ([0, 1, 1], 0.3, (20, 9, 5.3), 2),
    ],
)
def test_the_policies_of_the_worked_example(members, alpha, risks, action):
    sets = torch.tensor([members], dtype=torch.bool)
    np.testing.assert_allclose(robust_risk(sets, EXAMPLE, alpha)[0], risks, rtol=0, atol=1e-14)
    assert minimax_action(sets, EXAMPLE, alpha).tolist() == [action]


def test_ties_go_to_the_smallest_action():
    loss = torch.tensor([[3.0, 1, 1], [3, 1, 1]])
    assert minimax_action(torch.tensor([[True, False]]), loss, 0.1).tolist() == [1]
    assert best_response(torch.tensor([[0.4, 0.6]]), loss).tolist() == [1]
    # 0.1 * 3 and 0.3 * 1 differ in the last bit only
    assert smallest_index_of_minimum(torch.tensor([0.1 * 3, 0.3], dtype=torch.float64)).item() == 0
    assert smallest_index_of_minimum(torch.tensor([0.3, 0.1 * 3], dtype=torch.float64)).item() == 0


def test_best_response_takes_the_least_expected_loss():
    rng = np.random.default_rng(5)
    p, loss = rng.dirichlet(np.ones(4), 50), rng.random((4, 3))
    expected = [[sum(row[y] * loss[y, a] for y in range(4)) for a in range(3)] for row in p]
    np.testing.assert_array_equal(best_response(torch.tensor(p), torch.tensor(loss)), np.argmin(expected, 1))
    assert best_response(torch.tensor([[0.7, 0.2, 0.1]]), EXAMPLE).tolist() == [1]  # 4.4, 3.9, 5.4


@pytest.mark.parametrize("scale", [1e-13, 1e-6, 1 / 3, 7.0, 1e9])
def test_actions_do_not_depend_on_the_unit_of_the_loss(scale):
    rng = np.random.default_rng(6)
    p = torch.tensor(rng.dirichlet(np.ones(4), 60))
    sets = all_sets(4, empty=True)
    for _ in range(20):
        loss = torch.tensor(rng.integers(0, 9, (4, 3)), dtype=torch.float64)
        assert torch.equal(minimax_action(sets, loss * scale, 0.1), minimax_action(sets, loss, 0.1))
        assert torch.equal(best_response(p, loss * scale), best_response(p, loss))


def test_a_constant_added_to_the_whole_loss_matrix_changes_no_action():
    rng = np.random.default_rng(7)
    p = torch.tensor(rng.dirichlet(np.ones(4), 60))
    sets = all_sets(4)
    for constant in (0.3, 5.0, 1000.0):
        loss = torch.tensor(rng.integers(0, 9, (4, 3)), dtype=torch.float64)
        assert torch.equal(minimax_action(sets, loss + constant, 0.1), minimax_action(sets, loss, 0.1))
        assert torch.equal(best_response(p, loss + constant), best_response(p, loss))


def test_the_rank_is_the_exact_ceiling_of_decimal_levels():
    for n in range(400):
        for hundredths in (1, 5, 10, 15, 20, 30, 35, 50, 70, 90, 99):
            exact = math.ceil((1 - Fraction(hundredths, 100)) * (n + 1))
            assert required_rank(n, hundredths / 100) == exact, (n, hundredths)


def test_the_rank_counts_the_test_point_too():
    assert required_rank(9, 0.1) == 9  # not ceil(0.9 * 9) of nine points and not 10 by the last bit of 0.9 * 10
    assert required_rank(8, 0.1) == 9  # more than there are
    assert required_rank(99, 0.1) == 90


def test_probabilities_are_made_float64_and_scaled_to_one():
    p = torch.softmax(torch.randn(200, 7, generator=torch.Generator().manual_seed(0)), 1)
    checked = check_probabilities(p)
    assert checked.dtype == torch.float64
    torch.testing.assert_close(checked.sum(1), torch.ones(200, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(checked, p.double(), rtol=1e-6, atol=0)
    assert check_probabilities(torch.tensor([[0, 1], [1, 0]])).tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_checking_probabilities_that_were_checked_changes_no_bit():
    p = check_probabilities(torch.tensor(np.random.default_rng(0).dirichlet(np.ones(4), 500)))
    assert torch.equal(check_probabilities(p), p)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([0.5, 0.5], r"shape \(2,\)"),
        ([[1.0]], r"shape \(1, 1\).*at least 2 labels"),
        ([[0.5, 0.5], [0.7, 0.7]], "row 1 sum to 1.4"),
        ([[0.5, 0.5], [0.5, 0.49999]], "row 1 sum to 0.99999"),
        ([[0.0, 0.0]], "row 0 sum to 0"),
        ([[1.5, -0.5]], "row 0 .*at least 0"),
        ([[0.5, 0.5], [float("nan"), 0.5]], "row 1 .*finite"),
        ([[float("inf"), 0.5]], "row 0 .*finite"),
    ],
)
def test_bad_probabilities_are_refused(probabilities, message):
    with pytest.raises(ValueError, match=message):
        check_probabilities(torch.tensor(probabilities))


def test_rounding_of_probabilities_within_a_millionth_is_accepted():
    assert check_probabilities(torch.tensor([[0.5, 0.5 + 9e-7]], dtype=torch.float64)).sum() == 1
    with pytest.raises(ValueError, match="sum to"):
        check_probabilities(torch.tensor([[0.5, 0.5 + 1.1e-6]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ([1.0, 2.0, 3.0], r"shape \(3,\), expected \(3, actions\): rows are true labels, columns are actions"),
        ([[1.0, 2.0]], r"shape \(1, 2\), expected \(3, actions\): rows are true labels, columns are actions"),
        ([[1.0], [2.0], [-0.5]], "holds -0.5; losses are at least 0: adding a constant"),
        ([[1.0], [2.0], [float("nan")]], "not finite"),
        ([[1.0], [2.0], [float("inf")]], "not finite"),
        ([[], [], []], r"shape \(3, 0\)"),
    ],
)
def test_bad_losses_are_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        check_loss(loss, 3)


def test_losses_are_taken_as_lists_arrays_and_integers():
    expected = torch.tensor([[0.0, 0.1], [2, 3]], dtype=torch.float64)
    assert torch.equal(check_loss([[0, 0.1], [2, 3]]), expected)
    assert torch.equal(check_loss(np.array([[0, 0.1], [2, 3]])), expected)
    assert check_loss([[0, 1], [2, 3]], 2).dtype == torch.float64
    with pytest.raises(ValueError, match=r"expected \(labels, actions\)"):
        check_loss([1, 2])


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.5, float("nan")])
def test_an_alpha_outside_the_open_interval_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha is .*strictly between 0 and 1"):
        check_alpha(alpha)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 3], r"run from 0 to 3; with 3 labels they are 0..2"),
        ([-1, 2], r"run from -1 to 2"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ([0.5, 1.0], "integer|whole"),
        ([float("nan"), 1.0], "integer|whole|finite"),
    ],
)
def test_bad_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        check_labels(torch.tensor(labels), 3)


def test_no_labels_are_no_error_here():
    assert check_labels(torch.tensor([], dtype=torch.long), 3).tolist() == []
