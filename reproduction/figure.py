"""One figure of a method's claims: every seed as a dot, mean and interval as a bar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fulgurite.reproduction.statistics import mean_estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def claims_figure(claims: Sequence[dict[str, Any]]) -> "Figure | None":
    """A panel for each comparison and growth; None where there is none."""
    from matplotlib.figure import Figure

    drawn = [
        claim for claim in claims if claim["variants"] and any(one["mean"] is not None for one in claim["variants"])
    ]
    if not drawn:
        return None
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.4 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, claim in zip(panels, drawn, strict=False):
        (growth_panel if claim["kind"] == "growth" else comparison_panel)(axes, claim)
        axes.set_title(f"{claim['id']}: {claim['verdict']}", fontsize=10)
    for axes in panels[len(drawn) :]:
        axes.remove()
    return figure


def comparison_panel(axes: "Axes", claim: dict[str, Any]) -> None:
    """Settings along the axis, the variants of each side by side."""
    settings = list(dict.fromkeys(one["setting"] for one in claim["variants"]))
    names = list(dict.fromkeys(one["variant"] for one in claim["variants"]))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        colour = f"C{place}"
        for one in claim["variants"]:
            if one["variant"] == name and one["mean"] is not None:
                middle = settings.index(one["setting"]) + (place - (len(names) - 1) / 2) * width
                draw_values(axes, middle, one["values"], colour, width)
        axes.plot([], [], "o", color=colour, label=name)
    axes.set_xticks(range(len(settings)), settings, fontsize=8)
    if len(settings) > 2:
        axes.tick_params(axis="x", rotation=20)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.set_ylabel(y_label(claim))
    axes.legend(fontsize=8)


def growth_panel(axes: "Axes", claim: dict[str, Any]) -> None:
    """The value against the size, one line for each variant and choice of the rest."""
    sizes = claim["sizes"]
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in claim["variants"]:
        if one["mean"] is not None:
            lines.setdefault((sizes["rest"][one["setting"]], one["variant"]), []).append(one)
    for place, (names, points) in enumerate(lines.items()):
        points.sort(key=lambda one: sizes["of"][one["setting"]])
        x = [sizes["of"][one["setting"]] for one in points]
        label = ", ".join(name for name in names if name)
        axes.plot(x, [one["mean"] for one in points], color=f"C{place}", label=label)
        for size, one in zip(x, points, strict=True):
            axes.plot([size] * len(one["values"]), one["values"], ".", color=f"C{place}", alpha=0.6)
    axes.set(xlabel=sizes["name"].replace("_", " "), ylabel=y_label(claim))
    if sizes["scale"] == "log":
        axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=8)


def draw_values(axes: "Axes", middle: float, values: Sequence[float], colour: str, width: float) -> None:
    """Dots for the seeds; mean and interval beside them."""
    if len(set(values)) == 1:
        axes.plot([middle - width / 2.5, middle + width / 2.5], [values[0]] * 2, color=colour)
        return
    shifts = np.linspace(-0.25, 0.05, len(values)) * width
    axes.plot(middle + shifts, values, ".", color=colour, alpha=0.6)
    estimate = mean_estimate(values)
    assert estimate.bootstrap is not None
    low, high = estimate.bootstrap
    error = [[estimate.value - low], [high - estimate.value]]
    axes.errorbar(middle + 0.22 * width, estimate.value, error, fmt="_", color=colour, capsize=3)


def y_label(claim: dict[str, Any]) -> str:
    """What is measured, and which way is better."""
    names = list(dict.fromkeys(name for run in claim["runs"] for name in run.get("metrics", {})))
    label = claim["measure"] or (names[0] if len(names) == 1 else "value")
    if claim["kind"] == "growth":
        return str(label)
    return f"{label} ({'lower' if claim['expected'].startswith('lower') else 'higher'} is better)"
