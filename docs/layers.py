"""One text through the layers of a model: the likeliest next token after each of some layers.

``python -m docs.layers TEXT --svg FILE`` draws it. As in an early exit, the head reads the output
of every layer.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.start import start

    start()

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from app.characters import Labels
from app.common.parsers import MODEL, Groups, script
from app.common.picture import RULE, write_picture
from model.decoder import Decoder
from model.errors import InputError
from training.recipe import layer_outputs
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

GREEN = "#7cbd9c"
TOKENS = 6  # the last ones of the text
WIDTH = 2.2  # of a tile
OPTIONS: Groups = {
    "": {
        "text": {"metavar": "TEXT", "help": "the text that the model reads"},
        "--model": {**MODEL, "default": "small-llama"},
        "--svg": {
            "type": Path,
            "required": True,
            "metavar": "FILE",
            "help": "the picture to write: its last tokens, and the guess after each of them",
        },
    },
}


def sheet(height: float, left: float, right: float, top: float) -> Axes:
    """Return axes without a frame; the height of the figure is in inches, the rest in units of
    tiles.
    """
    return Figure(figsize=(7.5, height)).subplots(
        subplot_kw={
            "frame_on": False,
            "xticks": [],
            "yticks": [],
            "xlim": (left, right),
            "ylim": (0, top),
        }
    )


def tiles(
    axes: Axes, x: float, y: float, parts: Iterable[tuple[str, float, str]], name: str = ""
) -> float:
    """Draw a row of tiles (text, width, colour), with its name on the left. Returns its right end,
    in units of tiles.
    """
    axes.text(x - 0.2, y + 0.44, name, ha="right", va="center", weight="bold")
    for text, width, colour in parts:
        axes.add_patch(Rectangle((x, y), width, 0.9, fc=colour, ec="white", linewidth=1.5))
        axes.text(x + width / 2, y + 0.44, text, ha="center", va="center", fontsize=9)
        x += width
    return x


def explained(axes: Axes, colours: dict[str, str]) -> Figure:
    """Return the figure of these axes with the names of its colours below it."""
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=len(patches))
    return axes.figure


def shown_layers(count: int) -> list[int]:
    """Return the numbers of the first four of ``count`` layers, of some later ones, and of the
    last.
    """
    return [layer for layer in (1, 2, 3, 4, 8, 16, 32, 64) if layer < count] + [count]


@torch.inference_mode()
def guesses(model: Decoder, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the probability and id of the likeliest token after each token of a text, by layer:
    two tensors ``[layers, T]``.
    """
    states = layer_outputs(model, torch.tensor([ids]))
    probs = torch.stack([model.logits(hidden)[0].softmax(-1) for hidden in states])
    return probs.max(-1)


def picture(model: Decoder, tokenizer: Tokenizer, text: str) -> Figure:
    """Return a table of colours: columns are the last tokens of the text, rows are layers."""
    ids = tokenizer.encode(text)
    if len(ids) < TOKENS:
        raise InputError(f"the text has {len(ids)} tokens, and needs {TOKENS}")
    label = Labels(tokenizer.token_bytes, tokenizer.special)
    probs, tokens = guesses(model, ids)
    layers = shown_layers(model.num_layers)
    axes = sheet(0.4 * len(layers) + 1.1, -2.2, TOKENS * WIDTH, len(layers) + 1)
    read = [(f"… {label(token).strip()}", WIDTH, "none") for token in ids[-TOKENS:]]
    tiles(axes, 0, len(layers), read, "after")
    for row, layer in enumerate(reversed(layers)):
        found = zip(tokens[layer - 1], probs[layer - 1], tokens[-1], strict=True)
        parts = [
            (f"{label(int(guess)).strip()}  {prob:.2f}", WIDTH, GREEN if guess == last else RULE)
            for guess, prob, last in [*found][-TOKENS:]
        ]
        tiles(axes, 0, row, parts, f"layer {layer}")
    return explained(axes, {"the last layer's guess": GREEN, "another guess": RULE})


def draw(options: argparse.Namespace) -> None:
    """Write the picture. Raises InputError for a text of too few tokens."""
    folder = model_folder(options.model)
    model = load_model(folder, torch.float32)
    tokenizer = Tokenizer(folder)
    write_picture(lambda: picture(model, tokenizer, options.text), options.svg)


main = script(draw, OPTIONS, "python -m docs.layers", __doc__)


if __name__ == "__main__":
    sys.exit(main())
