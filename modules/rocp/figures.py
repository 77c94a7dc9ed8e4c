"""Figures of a classifier's test: what it confuses, and how far its probabilities can be trusted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
