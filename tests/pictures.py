"""Faults of pictures: drawing beyond the paper, legends over the drawing."""

from collections.abc import Callable, Iterator

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from app.common.picture import STYLE


def faults(draw: Callable[[], Figure]) -> Iterator[str]:
    """Parts beyond the paper, and legends over the drawing."""
    with rc_context(fname=STYLE):
        figure = draw()
        FigureCanvasAgg(figure).draw()
        drawn = figure.get_tightbbox()  # in inches
        if min(drawn.min) < 0 or any(drawn.max > figure.get_size_inches()):
            yield f"something reaches beyond the paper: {drawn}"
        legends = [legend.get_window_extent() for legend in figure.findobj(Legend)]
        for axes in figure.axes:
            if any(legend.overlaps(axes.get_window_extent()) for legend in legends):
                yield f"a legend lies over {axes.get_title()}"
