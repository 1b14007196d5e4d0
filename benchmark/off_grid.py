"""Weights off the four-bit grid: a copy of a checkpoint with noise that hardly changes its text.

The weights of a checkpoint that was made from a four-bit file lie on the grid of a four-bit draft.
Its draft is nearly the model itself, which says little about other checkpoints. The copy gets noise
of about the size of a rounding error, in the half of the input directions that text uses least. It
writes almost the same text, and rounding changes its weights.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from app.common.command_line import say
from app.common.files import read_text, write_text
from app.options import Options
from app.session import Session
from model.decoder import Decoder
from model.places import version
from model.quantise import GROUP, quantise
from weights.checkpoint import save_model
from weights.importance import PROMPTS, input_means, linear_layers
from weights.load import model_fingerprint

TOKENS = 48  # of each text
# files by whose change a copy is made anew
MADE_BY = (
    "benchmark/off_grid.py",
    "model/quantise.py",
    "weights/importance.py",
    "weights/prompts.txt",
)
TEXTS = 8  # seeds, each of which writes a text for every prompt: inputs are measured on these


def off_grid_folder(folder: Path) -> Path:
    """Return the folder of the copy, beside the checkpoint's; made unless it says that it was made
    from these weights by these files.
    """
    copy = folder.with_name(f"{folder.name}-off-grid")
    made_from = copy / "made_from.txt"
    sources = (
        f"{model_fingerprint(folder)}"
        f" {version(Path(__file__).parents[1] / name for name in MADE_BY)}"
    )
    if made_from.exists() and read_text(made_from) == sources:
        return copy
    say(
        f"making {copy.name}: noise in its weights, about as large as a four-bit rounding; some"
        " minutes"
    )
    session = Session(Options(model=str(folder), draft="none", max_new_tokens=TOKENS, device="cpu"))
    texts = [
        sample.source.tokens
        for seed in range(1, TEXTS + 1)
        for sample in session.write_all(PROMPTS, temperature=0.7, seed=seed)
    ]
    add_noise(session.model, texts, seed=0)
    save_model(session.model, copy, tokenizer_from=folder)
    write_text(made_from, sources)
    return copy


@torch.no_grad()
def add_noise(model: Decoder, texts: Sequence[Sequence[int]], seed: int) -> None:
    """Add noise to every matrix of a layer, in place; embedding and head stay.

    The noise is uniform within half a four-bit step of the weight's group. It is projected onto the
    eigenvectors of the inputs' uncentred covariance with the smaller half of the eigenvalues, and
    multiplied by √2 to restore its norm. The covariance is that on these ``texts``.
    """
    generator = torch.Generator().manual_seed(seed)
    covariances = input_means(model, texts, lambda x: x.T @ x)
    for name, layer in linear_layers(model).items():
        if name == "head":
            continue
        weight = layer.weight
        # the first half, since eigh sorts by rising eigenvalue
        weak = torch.linalg.eigh(covariances[name]).eigenvectors[:, : weight.shape[1] // 2]
        steps = quantise(weight, 4).scale.float().repeat_interleave(GROUP, 1)
        noise = torch.rand(weight.shape, generator=generator) - 0.5
        noise *= math.sqrt(2) * steps[:, : weight.shape[1]]
        weight.copy_(weight + noise @ weak @ weak.T)
