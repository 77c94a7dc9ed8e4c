"""Calibrate and predict sets: APS beside MAPIE's on the same probabilities, and ROCP's cost and growth.

Run: python benchmarks/rocp_calibration.py [--quick]     (needs the dev extra for MAPIE)
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from harness import describe_machine, growth_exponent, measure, print_comparison, print_single
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin

from fulgurite.modules import ConformalDecision

ALPHA = 0.1


def problem(n: int, k: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Peaked random probabilities (n, k) and labels drawn from them."""
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.full(k, 0.1), size=n)
    p = (p + 1e-6) / (p + 1e-6).sum(1, keepdims=True)
    return p, (p.cumsum(1) > generator.random((n, 1))).argmax(1)


class GivenProbabilities(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose features are its probabilities."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.classes_ = np.arange(k)

    def fit(self, x: NDArray[np.float64], y: NDArray[np.int64]) -> "GivenProbabilities":
        """Nothing to learn."""
        return self

    def predict_proba(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The features."""
        return x

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.int64]:
        """The most probable label."""
        return x.argmax(1)

    def __sklearn_is_fitted__(self) -> bool:
        return True


def our_aps(n: int, k: int) -> Callable[[], object]:
    """Calibrate on n samples and predict n sets."""
    (p, y), (q, _) = problem(n, k), problem(n, k, seed=1)
    return lambda: ConformalDecision(alpha=ALPHA, score="aps", rule="maxmin").fit(p, y).predict_sets(q)


def mapie_aps(n: int, k: int) -> Callable[[], object]:
    """The same with MAPIE."""
    from mapie.classification import SplitConformalClassifier

    (p, y), (q, _) = problem(n, k), problem(n, k, seed=1)

    def run() -> object:
        conformal = SplitConformalClassifier(
            GivenProbabilities(k), confidence_level=1 - ALPHA, conformity_score="aps", prefit=True
        )
        return conformal.conformalize(p, y).predict_set(q)

    return run


def our_rocp(n: int, k: int, a: int) -> Callable[[], object]:
    """Calibrate ROCP on n samples, predict n sets and actions; every loss is different."""
    (p, y), (q, _) = problem(n, k), problem(n, k, seed=1)
    loss = np.random.default_rng(2).random((k, a)) * 100
    test = torch.from_numpy(q)
    return lambda: ConformalDecision(loss, ALPHA).fit(p, y).decide(test)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, once each")
    quick = parser.parse_args().quick
    n, repeats = (2_000, 1) if quick else (20_000, 5)
    print(describe_machine())

    ours, peer = measure([(our_aps, (n, 100)), (mapie_aps, (n, 100))], repeats)
    print_comparison(f"APS, n = {n}, K = 100", ours, peer, "MAPIE")

    (rocp,) = measure([(our_rocp, (n, 100, 10))], min(repeats, 3))
    print_single(f"ROCP, n = {n}, K = 100, A = 10", rocp)

    n, k, a = n // 4, 50, 5
    for name, sizes, arguments in (
        ("n", [n, 2 * n, 4 * n, 8 * n], lambda size: (size, k, a)),
        ("K", [25, 50, 100, 200], lambda size: (n, size, a)),
        ("A", [2, 4, 8, 16], lambda size: (n, k, size)),
    ):
        found = [measure([(our_rocp, arguments(size))], 1 if quick else 3)[0] for size in sizes]
        steps = ", ".join(f"{size}: {m.median:.3f} s" for size, m in zip(sizes, found, strict=True))
        print(f"ROCP against {name}: {steps}; seconds grow as {name}^{growth_exponent(sizes, found):.2f}")


if __name__ == "__main__":
    main()
