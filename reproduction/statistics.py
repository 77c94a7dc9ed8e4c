"""Means, intervals and verdicts over seeds.

An interval is a bootstrap interval of the mean at 95 %. With five seeds it is too narrow, so a verdict also asks
Student's interval: both must lie on one side of the bound.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999

Verdict = Literal["holds", "does not hold", "inconclusive"]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """A mean over seeds.

    Args:
        mean: the mean.
        error: its standard error; None for a single value.
        n: number of values.
    """

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Mean and standard error (sample standard deviation over the root of n)."""
        array = np.asarray(values, dtype=np.float64)
        error = float(array.std(ddof=1) / np.sqrt(len(array))) if len(array) > 1 else None
        if error is not None and _constant(array):
            error = 0.0
        return cls(float(array.mean()), error, len(array))


@dataclass(frozen=True)
class Estimate:
    """An estimate with its two intervals; None where a single value has none.

    Args:
        value: the estimate.
        bootstrap: percentile bootstrap interval.
        student: Student's (Welch's for two samples) interval.
    """

    value: float
    bootstrap: tuple[float, float] | None
    student: tuple[float, float] | None

    def against(self, at_least: float | None = None, at_most: float | None = None) -> Verdict:
        """Whether the true value lies within the bounds: strictly, by both intervals.

        Returns:
            ``holds`` where both intervals lie inside, ``does not hold`` where both lie outside one bound.
        """
        if self.bootstrap is None or self.student is None:
            return "inconclusive"
        low, high = min(self.bootstrap[0], self.student[0]), max(self.bootstrap[1], self.student[1])
        if (at_least is not None and high <= at_least) or (at_most is not None and low >= at_most):
            return "does not hold"
        inside = (at_least is None or low > at_least) and (at_most is None or high < at_most)
        return "holds" if inside else "inconclusive"


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of one sample, such as paired differences, with its intervals."""
    array = np.asarray(values, dtype=np.float64)
    value = float(array.mean())
    if len(array) < 2:
        return Estimate(value, None, None)
    if _constant(array):
        return Estimate(value, (value, value), (value, value))
    resampled = stats.bootstrap(
        (array,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    student = stats.ttest_1samp(array, 0).confidence_interval(CONFIDENCE)
    return Estimate(value, _pair(resampled.confidence_interval), _pair(student))


def difference_estimate(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """The mean of ``one`` less the mean of ``other``, unpaired, with its intervals."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    value = float(a.mean() - b.mean())
    if min(len(a), len(b)) < 2:
        return Estimate(value, None, None)
    if _constant(a) and _constant(b):
        return Estimate(value, (value, value), (value, value))

    def difference(x: Values, y: Values, axis: int) -> Values:
        return np.asarray(x.mean(axis=axis) - y.mean(axis=axis))

    resampled = stats.bootstrap(
        (a, b), difference, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=0
    )
    student = stats.ttest_ind(a, b, equal_var=False).confidence_interval(CONFIDENCE)
    return Estimate(value, _pair(resampled.confidence_interval), _pair(student))


def growth_estimate(sizes: Sequence[float], values: Sequence[Sequence[float]], log: bool) -> Estimate:
    """The exponent (``log``) or slope of values against sizes, by least squares.

    With several seeds each is fitted by itself and the estimate is the mean of the fits; with one seed Student's
    interval is that of the regression, and no bootstrap is possible: it serves as both.

    Args:
        sizes: (J,).
        values: (seeds, J).
        log: fit the logarithms.

    Raises:
        ValueError: a value is not positive where logarithms are asked for, or there are too few sizes.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(np.unique(x)) < 2:
        raise ValueError("a growth needs at least two different sizes")
    if log:
        if (x <= 0).any() or (y <= 0).any():
            raise ValueError("a value is not positive, so that it has no logarithm; fit a linear scale")
        x, y = np.log(x), np.log(y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a perfect fit of two sizes has no residual
        fits = [stats.linregress(x, row) for row in y]
    if len(fits) > 1:
        return mean_estimate([float(fit.slope) for fit in fits])
    slope = float(fits[0].slope)
    if len(x) < 3:
        return Estimate(slope, None, None)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2) * fits[0].stderr)
    return Estimate(slope, (slope - half, slope + half), (slope - half, slope + half))


def joined(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim that asks for all of several things."""
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if verdicts and all(verdict == "holds" for verdict in verdicts) else "inconclusive"


def _constant(values: Values) -> bool:
    """Whether values differ by no more than rounding."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def _pair(interval: tuple[float, float]) -> tuple[float, float]:
    return float(interval[0]), float(interval[1])
