"""One text through the layers of a model: the likeliest next token after each of some layers.

``python -m docs.layers TEXT --svg FILE`` draws it. As in an early exit, the head reads the output
of every layer.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import sys

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from app.characters import Labels
from app.common.files import check_place
from app.common.parsers import MODEL, Groups, picture_file, script
from app.common.picture import RULE, write_picture
from app.prompt import check_ids, checked_text
from model.decoder import Decoder
from model.errors import InputError
from training.recipe import layer_outputs
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

GREEN = "#7cbd9c"
TOKENS = 6  # the last ones of the text
SHOWN = (1, 2, 3, 4, 8, 16, 32, 64)  # layers, beside the last one
OPTIONS: Groups = {
    "": {
        "text": {"metavar": "TEXT", "help": "the text that the model reads"},
        "--model": {**MODEL, "default": "small-llama"},
        "--svg": {
            "type": picture_file,
            "required": True,
            "metavar": "FILE",
            "help": "the picture to write, as .svg or .png: the last tokens, and the guess after"
            " each of them",
        },
    },
}


@torch.inference_mode()
def guesses(model: Decoder, ids: list[int], layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest token after each of the last ``TOKENS``, and its probability, by the
    head that reads the output of each of the ``layers``: both [layers, TOKENS].
    """
    states = [*layer_outputs(model, torch.tensor([ids]))]
    logits = [model.logits(states[layer - 1])[0, -TOKENS:] for layer in layers]
    probs, tokens = torch.stack(logits).softmax(-1).max(-1)
    return tokens, probs


def picture(model: Decoder, tokenizer: Tokenizer, text: str) -> Figure:
    """Return a table of colours: columns are the last tokens of the text, rows are layers. Raises
    InputError for a text that is no UTF-8, has too few tokens or is beyond the context.
    """
    ids = tokenizer.encode(checked_text(text))
    check_ids(ids, model.config, model.config.max_positions)
    if len(ids) < TOKENS:
        raise InputError(f"the text has {len(ids)} tokens, and needs {TOKENS}")
    layers = [layer for layer in SHOWN if layer < model.num_layers] + [model.num_layers]
    tokens, probs = guesses(model, ids, layers)
    label = Labels(tokenizer.token_bytes, tokenizer.special)
    figure = Figure(figsize=(7.5, 0.4 * len(layers) + 1.1))
    axes = figure.subplots(subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
    shown = axes.table(
        [
            [f"{label(token).strip()}  {prob:.2f}" for token, prob in zip(*row, strict=True)]
            for row in zip(tokens.tolist(), probs.tolist(), strict=True)
        ],
        [[GREEN if equal else RULE for equal in row] for row in tokens == tokens[-1]],
        rowLabels=[f"layer {layer}" for layer in layers],
        colLabels=[f"… {label(token).strip()}" for token in ids[-TOKENS:]],
        cellLoc="center",
        bbox=(0, 0, 1, 1),
    )
    for cell in shown.get_celld().values():
        cell.set_edgecolor("white")
    figure.legend(
        handles=[
            Patch(color=GREEN, label="the last layer's guess"),
            Patch(color=RULE, label="another guess"),
        ],
        loc="outside lower left",
        ncols=2,
    )
    return figure


def draw(options: argparse.Namespace) -> None:
    """Write the picture. Raises InputError."""
    check_place(options.svg)
    folder = model_folder(options.model)
    model = load_model(folder, torch.float32)
    write_picture(lambda: picture(model, Tokenizer(folder), options.text), options.svg)


main = script(draw, OPTIONS, "python -m docs.layers", __doc__)


if __name__ == "__main__":
    sys.exit(main())
