"""What all plots of the papers' pages share."""

import matplotlib.pyplot as plt
import pytest

from jaxdp.papers.tables import style


@pytest.mark.parametrize(("label", "rows"), [("short", 1), ("a label that takes much room", 2)])
def test_a_legend_has_as_many_columns_as_the_figure_is_wide(label, rows):
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for number in range(4):
        axes.plot([0, 1], [number, 1], label=f"{number} {label}")
    style.legend(figure, (axes,), 4)
    (legend,) = figure.legends
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len({round(text.get_window_extent().y0) for text in legend.get_texts()}) == rows
    plt.close(figure)
