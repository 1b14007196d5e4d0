"""Faults of pictures: drawing beyond the paper, covered or cut text, counts in fractions."""

from collections.abc import Callable, Iterator

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from app.picture import STYLE

COUNTED = ("layer", "trial", "step", "tokens", "exit after layer")  # the names of axes that count


def faults(draw: Callable[[], Figure]) -> Iterator[str]:
    """Parts beyond the paper, titles wider than their frame, legends over the drawing, counts in
    fractions.
    """
    with rc_context(fname=STYLE):
        figure = draw()
        FigureCanvasAgg(figure).draw()
        drawn = figure.get_tightbbox()  # in inches
        if min(drawn.min) < 0 or any(drawn.max > figure.get_size_inches()):
            yield f"something reaches beyond the paper: {drawn}"
        for axes in figure.axes:
            title = axes.title if axes.title.get_text() else axes._left_title
            if title.get_text() and title.get_window_extent().x1 > axes.get_window_extent().x1:
                yield f"the title {title.get_text()} is wider than its frame"
            for legend in figure.findobj(Legend):
                if legend.get_window_extent().overlaps(axes.get_window_extent()):
                    yield f"a legend lies over {title.get_text()}"
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_label_text() in COUNTED and any(
                    tick % 1 for tick in axis.get_ticklocs()
                ):
                    yield f"{axis.get_label_text()} is counted in fractions"
