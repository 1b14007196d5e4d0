"""Common style of pictures: dark ink on a white background, and the reverse on a dark page."""

from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from app.common.files import atomic_path
from model.errors import explaining

INK = "#22242a"
MUTED = "#5d636e"
RULE = "#e2e3e6"
RED = "#c8453a"
# From few to many
SCALE = LinearSegmentedColormap.from_list(
    "amber to blue", ["#f3bd4e", "#6fae8f", "#2c6fae", "#1b2f6b"]
)
# Light and dark are exchanged, hues stay.
DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(.9) hue-rotate(180deg)}}</style>"
STYLE = Path(__file__).with_name("pictures.mplstyle")


def write_picture(draw: Callable[[], Figure], path: Path) -> None:
    """Draw in this style, and write the file, atomically, in the format of its suffix. Raises
    InputError when it cannot be written.
    """
    form = path.suffix[1:]
    with (
        rc_context(fname=STYLE),
        explaining(f"{path} cannot be written"),
        atomic_path(path) as temporary,
    ):
        draw().savefig(
            temporary, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None
        )
        if form == "svg":
            # which fails where matplotlib writes no style
            before, after = temporary.read_text(encoding="utf-8").split("</style>", 1)
            temporary.write_text(before + DARK + after, encoding="utf-8")
