"""Common style of pictures: dark ink on a white background, for light and dark pages."""

from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from cli.files import atomic_path

INK = "#22242a"
MUTED = "#5d636e"
RULE = "#e2e3e6"
RED = "#c8453a"
# few to many
SCALE = LinearSegmentedColormap.from_list(
    "amber to blue", ["#f3bd4e", "#6fae8f", "#2c6fae", "#1b2f6b"]
)
STYLE = Path(__file__).with_name("pictures.mplstyle")


def write_picture(draw: Callable[[], Figure], path: Path) -> None:
    """Draw in this style, and write the file, in the format of its suffix. Raises OSError."""
    form = path.suffix[1:]
    with rc_context(fname=STYLE), atomic_path(path) as temporary:
        draw().savefig(
            temporary, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None
        )
