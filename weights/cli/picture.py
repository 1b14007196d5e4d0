"""Common style of pictures: dark ink on a white background, for light and dark pages."""

from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from weights.cli.files import atomic_path

INK, MUTED, RULE, BLUE, RED = "#22242a", "#5d636e", "#e2e3e6", "#3b6fd4", "#c8453a"
SCALE = LinearSegmentedColormap.from_list("amber to blue", ["#f3bd4e", "#6fae8f", "#2c6fae", "#1b2f6b"])  # few to many
STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.15,  # inches of margin
    "figure.constrained_layout.h_pad": 0.12,
    "svg.hashsalt": "pictures",  # equal pictures are equal files
}


def write_picture(draw: Callable[[], Figure], path: Path) -> None:
    """Draw in this style and write the file atomically, in the format of its suffix. Raises OSError on failure."""
    form = path.suffix[1:]
    with rc_context(STYLE), atomic_path(path) as temporary:
        draw().savefig(temporary, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
