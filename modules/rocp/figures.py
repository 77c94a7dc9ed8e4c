"""Figures: what a classifier confuses, how far its probabilities can be trusted, and what is decided with them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fulgurite.modules.rocp.functional_curve import Calibration, Curve, curve_points, selector_hulls

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def confusion_figure(counts: NDArray[np.int64], names: Sequence[str]) -> "Figure":
    """Confusion matrix; ``counts`` (K, K) has true labels as rows, shaded by the share of the row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.1 * len(names) + 2.2, 0.9 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted", ylabel="true")
    for (row, column), count in np.ndenumerate(counts):
        colour = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{count}", ha="center", va="center", color=colour)
    return figure


def reliability_figure(confidence: NDArray[np.float64], correct: NDArray[np.bool_], n_bins: int = 10) -> "Figure":
    """Reliability diagram: accuracy against confidence in equal bins, with the number of samples below.

    ``confidence`` (N,) is the probability of the predicted label, ``correct`` (N,) whether it was right.
    """
    from matplotlib.figure import Figure

    confidence, correct = np.atleast_1d(confidence, correct)  # one sample comes as a number
    edges = np.linspace(0, 1, n_bins + 1)
    bins = np.digitize(confidence, edges[1:-1])
    number = np.bincount(bins, minlength=n_bins)
    hits = np.bincount(bins, weights=correct, minlength=n_bins)
    filled = number > 0
    middle = (edges[:-1] + edges[1:]) / 2

    figure = Figure(figsize=(4.2, 4.8), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    top.bar(middle[filled], hits[filled] / number[filled], width=0.9 / n_bins, color="tab:blue", label="accuracy")
    top.plot((0, 1), (0, 1), color="black", linewidth=1, label="calibrated")
    top.set(ylabel="accuracy", ylim=(0, 1), xlim=(0, 1))
    top.legend(loc="upper left")
    bottom.bar(middle, number, width=0.9 / n_bins, color="tab:grey")
    bottom.set(xlabel="confidence", ylabel="samples")
    return figure


def decision_figure(
    counts: Mapping[str, NDArray[np.int64]], label_names: Sequence[str], action_names: Sequence[str]
) -> "Figure":
    """What each arm does: for every arm a table (K, A) of labels by actions, shaded by the share of the label."""
    from matplotlib.figure import Figure

    columns = min(3, len(counts))
    lines = -(-len(counts) // columns)
    size = (2.0 + columns * 0.75 * len(action_names), 0.9 + lines * (0.6 + 0.5 * len(label_names)))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(counts) :]:
        axes.set_axis_off()
    for axes, (name, table) in zip(grid.flat, counts.items(), strict=False):
        shares = table / table.sum(axis=1, keepdims=True).clip(1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(name)
        axes.set_xticks(range(len(action_names)), action_names, rotation=30, ha="right")
        axes.set_yticks(range(len(label_names)), label_names)
        for (row, column), count in np.ndenumerate(table):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{count}", ha="center", va="center", color=colour, fontsize=8)
    return figure


def sweep_figure(levels: Sequence[float], losses: Mapping[str, Sequence[float]]) -> "Figure":
    """Mean loss of each arm against alpha."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        axes.plot(levels, values, marker="o", markersize=3, label=name)
    axes.set(xlabel="alpha", ylabel="mean loss on the test samples", ylim=(0, None))
    axes.legend()
    return figure


def coverage_figure(calibration: Calibration, n: int, alpha: float) -> "Figure":
    """Coverage of the calibration points against the price beta, with beta_A and the prices one point short of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    prices, shares = calibration.breakpoints.numpy(), calibration.counts.numpy() / n
    finite = calibration.price if np.isfinite(calibration.price) else prices[-1]
    end = max(2 * finite, prices[len(prices) // 2], 1e-9)
    axes.step([*prices, max(end, prices[-1])], [*shares, shares[-1]], where="post", label="covered calibration points")
    axes.axhline(calibration.rank / n, color="black", linewidth=1, linestyle=":", label=f"k / n for alpha = {alpha:g}")
    for low, high in zip(calibration.low.tolist(), calibration.high.tolist(), strict=True):
        axes.axvspan(low, min(high, end), color="tab:orange", alpha=0.4, linewidth=0)
    if np.isfinite(calibration.price):
        axes.axvline(calibration.price, color="tab:red", linewidth=1, label=r"$\beta_A$")
    axes.set(xlabel=r"price $\beta$ of coverage", ylabel="share covered", xlim=(0, end))
    axes.legend(loc="lower right")
    return figure


def hull_figure(probabilities: Tensor, loss: Tensor, curve: Curve) -> "Figure":
    """The value V(p, t) of a few samples at the candidate levels, and the hull of the levels that can be selected."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(probabilities), 3.0), layout="constrained")
    level, value, _, _ = curve_points(probabilities, loss, curve)
    hulls = selector_hulls(probabilities, loss, curve)
    top = 1.5 * float(hulls.value.max())  # candidates far above every hull are left out
    for number, axes in enumerate(np.atleast_1d(figure.subplots(1, len(probabilities), sharey=True))):
        own = hulls.sample == number
        axes.plot(level[number], value[number], "o", color="tab:grey", markersize=3, label="candidates")
        axes.plot(hulls.level[own], hulls.value[own], "o-", color="tab:blue", markersize=4, label="hull")
        axes.set(xlabel="level t", ylim=(0, top or 1), title=f"largest p {probabilities[number].max():.2f}")
        if number == 0:
            axes.set_ylabel("value V(p, t)")
            axes.legend()
    return figure
