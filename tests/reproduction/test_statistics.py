"""Intervals against closed forms and by their coverage; verdicts at and around their bounds."""

import itertools

import numpy as np
import pytest
from scipy import stats

from fulgurite.reproduction.statistics import (
    Estimate,
    Summary,
    difference_estimate,
    growth_estimate,
    joined,
    mean_estimate,
)


def test_mean_and_standard_error_are_the_textbook_ones():
    summary = Summary.of([1.0, 2.0, 4.0, 5.0])
    assert summary.mean == 3.0
    assert summary.error == pytest.approx(np.sqrt((4 + 1 + 1 + 4) / 3) / 2)
    assert Summary.of([7.0]).error is None


def test_students_interval_is_the_closed_form():
    values = [0.3, 0.9, 0.4, 0.7, 1.2]
    half = stats.t.ppf(0.975, 4) * np.std(values, ddof=1) / np.sqrt(5)
    estimate = mean_estimate(values)
    assert estimate.student == pytest.approx((0.7 - half, 0.7 + half))


def test_the_bootstrap_interval_is_that_of_all_resamples():
    values = [0.0, 1.0, 5.0, 2.5, 0.7]
    means = [np.mean(resample) for resample in itertools.product(values, repeat=5)]
    expected = np.quantile(means, [0.025, 0.975])
    assert mean_estimate(values).bootstrap == pytest.approx(tuple(expected), abs=0.1)


def test_welchs_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        one, other = generator.normal(1.0, 1.0, 6), generator.normal(0.0, 3.0, 9)
        estimate = difference_estimate(one, other)
        assert estimate.student is not None
        covered += estimate.student[0] < 1.0 < estimate.student[1]
    assert 0.91 < covered / 300 < 0.985


def test_a_false_claim_is_said_to_hold_rarely():
    # Of the two one-sided errors of a 95 % interval one would let a useless method pass: 2.5 % of the time.
    generator = np.random.default_rng(1)
    passed = sum(mean_estimate(generator.normal(0, 1, 5)).against(at_least=0.0) == "holds" for _ in range(400))
    assert passed / 400 < 0.045


def test_equal_values_have_an_interval_without_width_and_one_value_has_none():
    assert mean_estimate([2.0, 2.0, 2.0]) == Estimate(2.0, (2.0, 2.0), (2.0, 2.0))
    assert difference_estimate([2.0, 2.0], [1.0, 1.0]) == Estimate(1.0, (1.0, 1.0), (1.0, 1.0))
    assert mean_estimate([2.0]) == Estimate(2.0, None, None)
    assert difference_estimate([2.0], [1.0, 3.0]).student is None


def test_the_same_values_give_the_same_interval():
    values = [0.3, 0.9, 0.4, 0.7, 1.2]
    assert mean_estimate(values) == mean_estimate(values)


@pytest.mark.parametrize(
    ("bootstrap", "student", "verdict"),
    [
        ((0.1, 0.3), (0.05, 0.4), "holds"),
        ((0.1, 0.3), (-0.05, 0.4), "inconclusive"),
        ((-0.1, 0.3), (0.05, 0.4), "inconclusive"),
        ((-0.3, -0.1), (-0.4, 0.1), "inconclusive"),
        ((-0.3, -0.1), (-0.4, -0.05), "does not hold"),
        ((0.0, 0.0), (0.0, 0.0), "does not hold"),
        (None, None, "inconclusive"),
    ],
)
def test_a_verdict_asks_both_intervals(bootstrap, student, verdict):
    assert Estimate(0.0, bootstrap, student).against(at_least=0.0) == verdict


def test_a_verdict_between_two_bounds():
    assert Estimate(1.0, (0.95, 1.05), (0.9, 1.1)).against(at_least=0.8, at_most=1.2) == "holds"
    assert Estimate(1.0, (0.95, 1.05), (0.9, 1.3)).against(at_least=0.8, at_most=1.2) == "inconclusive"
    assert Estimate(2.0, (1.95, 2.05), (1.9, 2.1)).against(at_least=0.8, at_most=1.2) == "does not hold"


def test_the_exponent_of_a_power_is_found():
    sizes = [10, 20, 40, 80]
    estimate = growth_estimate(sizes, [[3.0 * size**1.5 for size in sizes]], log=True)
    assert estimate.value == pytest.approx(1.5)
    assert estimate.student == pytest.approx((1.5, 1.5))


def test_the_interval_of_one_fit_is_that_of_the_regression():
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.1, 1.9, 3.2, 3.8])
    slope, _ = np.polyfit(x, y, 1)
    residual = y - np.polyval(np.polyfit(x, y, 1), x)
    error = np.sqrt((residual**2).sum() / 2 / ((x - x.mean()) ** 2).sum())
    half = stats.t.ppf(0.975, 2) * error
    estimate = growth_estimate(x, [y], log=False)
    assert estimate.value == pytest.approx(slope)
    assert estimate.student == pytest.approx((slope - half, slope + half))


def test_several_seeds_are_fitted_one_by_one():
    rows = [[1.0, 2.0], [1.0, 4.0], [1.0, 3.0]]
    estimate = growth_estimate([0, 1], rows, log=False)
    assert estimate == mean_estimate([1.0, 3.0, 2.0])


def test_a_growth_that_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="no logarithm"):
        growth_estimate([1, 2], [[1.0, 0.0]], log=True)
    with pytest.raises(ValueError, match="two different sizes"):
        growth_estimate([2, 2], [[1.0, 2.0]], log=True)
    assert growth_estimate([1, 2], [[1.0, 2.0]], log=True).student is None


def test_a_claim_needs_all_its_parts():
    assert joined(["holds", "holds"]) == "holds"
    assert joined(["holds", "inconclusive"]) == "inconclusive"
    assert joined(["holds", "inconclusive", "does not hold"]) == "does not hold"
    assert joined([]) == "inconclusive"
