"""Folder of a training run: the start of a run, the saved model and state, and its continuation."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model import Decoder, InputError, build, parse_config
from weights.cli.files import atomic_path, explaining, read_json
from weights.load import load_model
from weights.names import model_folder
from weights.save import TOKENIZER_FILES, save_model
from weights.tokenizer import Tokenizer
from weights.training.corpus import Rows, read_documents, rows_of, train_tokenizer

TRAINING = "training"  # the folder beside the weights
STATE = f"{TRAINING}/state.pt"


def prepare(options: argparse.Namespace) -> tuple[Decoder, Rows, Rows]:
    """Initial model in float32, training rows, and held-out rows; a new tokenizer is written into ``--out``.

    Raises InputError for a wrong model, text or folder.
    """
    out, start = options.out, options.start_from and model_folder(options.start_from)
    config = parse_config(read_json(start / "config.json" if start else options.config))
    if options.context > config.max_positions:
        raise InputError(f"--context {options.context} is more than the config's {config.max_positions} positions")
    if not (out / TRAINING).exists() and any((out / name).exists() for name in ("config.json", *TOKENIZER_FILES)):
        raise InputError(f"{out} holds a model that train.py did not make: give another --out")
    documents = read_documents(options.data)
    if not options.tokenizer and not (out / STATE).exists():
        (out / TRAINING).mkdir(parents=True, exist_ok=True)
        train_tokenizer(documents, options.vocab_size, out)
    tokenizer = Tokenizer(_tokenizer_folder(options))
    rows = rows_of(documents, tokenizer, options.context)
    if start:
        return load_model(start, torch.float32), *rows
    model = build(replace(config, vocab_size=len(tokenizer.vocabulary.pieces)))
    model.initialise(std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed))
    return model, *rows


def _tokenizer_folder(options: argparse.Namespace) -> Path:
    return model_folder(options.tokenizer) if options.tokenizer else options.out


def save_run(options: argparse.Namespace, model: Decoder, state: dict[str, Any]) -> None:
    """Write ``model`` as an ordinary bf16 folder, then the ``state`` to continue from, each file atomically.

    A run that is killed between the two repeats the last steps. Raises InputError when ``--out`` cannot be written.
    """
    published = build(model.config).to(torch.bfloat16)
    published.load_state_dict(model.state_dict())
    save_model(published, options.out, tokenizer_from=_tokenizer_folder(options))
    trouble = f"{options.out / STATE} cannot be written, the last saved state is kept; free some space and run again"
    with explaining(trouble, (OSError, RuntimeError)), atomic_path(options.out / STATE) as temporary:
        torch.save(state, temporary)


def load_state(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """State saved in ``out``, None where there is none. Raises InputError for a run with other ``settings``."""
    if not (out / STATE).exists():
        return None
    state = torch.load(out / STATE, map_location="cpu", weights_only=True)
    for name, value in settings.items():
        if (saved := state["settings"].get(name)) != value:
            raise InputError(f"{out} holds a run with another {name} ({saved}): give the same, or another --out")
    return state
