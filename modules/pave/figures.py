"""Figures: what a policy does over an episode and its spectrum, how the critic bends, and the bound on the policy."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.floating]


def action_figure(actions: Array, steps: int = 200) -> "Figure":
    """The first ``steps`` actions of an episode (T, A), and the amplitude spectrum of all of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(actions[:steps], linewidth=1)
    left.set(xlabel="step", ylabel="action")
    half = len(actions) // 2
    frequency = np.arange(half) / max(len(actions), 1)
    amplitude = 2 / max(len(actions), 1) * np.abs(np.fft.fft(actions, axis=0))[:half]
    right.plot(frequency, amplitude, linewidth=1)
    right.set(xlabel="frequency (cycles a step)", ylabel="amplitude")
    return figure


def surface_figure(states: Array, actions: Array, bend: Array, pair: tuple[int, int], limit: float | None) -> "Figure":
    """How fast the action gradient turns with the state, around a reference pair.

    Args:
        states: (N,) offsets of one state dimension.
        actions: (M,) values of one action dimension.
        bend: (N, M) spectral norm of Q_as.
        pair: indices of the state and the action dimension.
        limit: upper end of the colours; None means the largest value.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axes = figure.subplots()
    mesh = axes.pcolormesh(actions, states, bend, cmap="viridis", vmin=0, vmax=limit, shading="nearest")
    figure.colorbar(mesh, ax=axes, label="spectral norm of Q_as")
    axes.set(xlabel=f"action {pair[1]}", ylabel=f"state {pair[0]} (offset)")
    return figure


def bound_figure(bound: Array, measured: Array, actor: Array) -> "Figure":
    """The pointwise bound M / mu (N,) against the measured slope of argmax_a Q (N,) and the actor's own (N,)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(bound, measured, ".", label="argmax of the critic, by differences")
    axes.plot(bound, actor, "x", markersize=4, alpha=0.6, label="the actor")
    ends = [min(bound.min(), measured.min(), actor.min()), max(bound.max(), measured.max(), actor.max())]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(xlabel="bound M / mu", ylabel="slope of the policy", xscale="log", yscale="log")
    axes.legend(fontsize=8)
    return figure
