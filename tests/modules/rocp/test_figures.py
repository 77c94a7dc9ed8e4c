import numpy as np

from fulgurite.modules.rocp.figures import confusion_figure, reliability_figure


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
