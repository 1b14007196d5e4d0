"""One text through the layers of a model: the likeliest next token after each of some layers.

``python -m docs.layers TEXT --svg FILE`` draws it. As in an early exit, the head reads the output
of every layer.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
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
    """Return a table of colours: columns are the last tokens of the text, rows are layers. Raises
    InputError for a text of too few tokens.
    """
    ids = tokenizer.encode(text)
    if len(ids) < TOKENS:
        raise InputError(f"the text has {len(ids)} tokens, and needs {TOKENS}")
    label = Labels(tokenizer.token_bytes, tokenizer.special)
    layers = shown_layers(model.num_layers)
    rows = [layer - 1 for layer in layers]
    probs, tokens = (each[rows, -TOKENS:] for each in guesses(model, ids))
    is_last = (tokens == tokens[-1]).tolist()
    found = zip(tokens.tolist(), probs.tolist(), strict=True)
    figure = Figure(figsize=(7.5, 0.4 * len(layers) + 1.1))
    axes = figure.subplots(subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
    shown = axes.table(
        [
            [f"{label(guess).strip()}  {prob:.2f}" for guess, prob in zip(*row, strict=True)]
            for row in found
        ],
        [[GREEN if equal else RULE for equal in row] for row in is_last],
        rowLabels=[f"layer {layer}" for layer in layers],
        colLabels=[f"… {label(token).strip()}" for token in ids[-TOKENS:]],
        cellLoc="center",
        bbox=(0, 0, 1, 1),
    )
    for cell in shown.get_celld().values():
        cell.set_edgecolor("white")
    colours = {"the last layer's guess": GREEN, "another guess": RULE}
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches))
    return figure


def draw(options: argparse.Namespace) -> None:
    """Write the picture. Raises InputError."""
    folder = model_folder(options.model)
    model = load_model(folder, torch.float32)
    tokenizer = Tokenizer(folder)
    write_picture(lambda: picture(model, tokenizer, options.text), options.svg)


main = script(draw, OPTIONS, "python -m docs.layers", __doc__)


if __name__ == "__main__":
    sys.exit(main())
