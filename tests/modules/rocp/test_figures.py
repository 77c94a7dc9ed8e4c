import numpy as np
import pytest
import torch

from fulgurite.modules.rocp.figures import (
    confusion_figure,
    coverage_figure,
    decision_figure,
    hull_figure,
    reliability_figure,
    sweep_figure,
)
from fulgurite.modules.rocp.functional_curve import calibrate, selector_hulls


def test_the_confusion_matrix_shows_every_count_and_name():
    counts = np.array([[5, 1, 0], [2, 7, 0], [0, 0, 0]])
    (axes,) = confusion_figure(counts, ["a", "b", "c"]).axes
    assert [text.get_text() for text in axes.texts] == [str(count) for count in counts.ravel()]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_the_bars_of_the_reliability_diagram_are_accuracies_by_confidence():
    confidence = np.array([0.05, 0.32, 0.38, 0.99, 1.0])
    correct = np.array([False, True, False, True, True])
    top, bottom = reliability_figure(confidence, correct).axes
    heights = {round(bar.get_x() + bar.get_width() / 2, 2): bar.get_height() for bar in top.patches}
    assert heights == {0.05: 0.0, 0.35: 0.5, 0.95: 1.0}
    assert [int(bar.get_height()) for bar in bottom.patches] == [1, 0, 0, 2, 0, 0, 0, 0, 0, 2]


def problem():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(30, 3, generator=generator, dtype=torch.float64)
    loss = torch.tensor([[0, 4, 6], [12, 1, 5], [20, 9, 2]], dtype=torch.float64)
    return p / p.sum(1, keepdim=True), loss


def test_the_decision_figure_has_a_table_for_every_arm():
    counts = {name: np.arange(6).reshape(2, 3) for name in ("one", "two", "three", "four")}
    figure = decision_figure(counts, ["well", "sick"], ["wait", "test", "treat"])
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == list(counts)
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1", "2", "3", "4", "5"]


def test_the_sweep_draws_every_arm_at_every_level():
    (axes,) = sweep_figure([0.05, 0.1], {"rocp": [1.0, 2.0], "lac": [3.0, 4.0]}).axes
    assert [line.get_label() for line in axes.lines] == ["rocp", "lac"]
    assert axes.lines[1].get_ydata().tolist() == [3.0, 4.0]


@pytest.mark.parametrize("alpha", [0.2, 0.001], ids=["reached", "never reached"])
def test_the_coverage_curve_is_the_step_function(alpha):
    p, loss = problem()
    calibration = calibrate(selector_hulls(p, loss), p.argmax(1), loss, alpha)
    (axes,) = coverage_figure(calibration, 30, alpha).axes
    drawn = dict(zip(axes.lines[0].get_xdata(), axes.lines[0].get_ydata(), strict=True))
    for price, count in zip(calibration.breakpoints.tolist(), calibration.counts.tolist(), strict=True):
        assert drawn[price] == pytest.approx(count / 30)


def test_the_hull_figure_shows_the_vertices_of_each_sample():
    p, loss = problem()
    hulls = selector_hulls(p[:3], loss)
    figure = hull_figure(p[:3], loss, "rocp")
    assert len(figure.axes) == 3
    for number, axes in enumerate(figure.axes):
        assert axes.lines[1].get_xdata().tolist() == hulls.level[hulls.sample == number].tolist()
