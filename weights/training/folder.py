"""Folder of a training run: its start, the saved model, log and state, and its continuation."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model import Decoder, InputError, build, parse_config
from weights.cli.files import atomic_path, explaining, read_json
from weights.load import load_model
from weights.save import save_model
from weights.tokenizer import Tokenizer
from weights.training.corpus import Rows, read_documents, rows_of, train_tokenizer

TRAINING = "training"  # the folder beside the weights
STATE, LOG = f"{TRAINING}/state.pt", f"{TRAINING}/log.jsonl"


def prepare(options: argparse.Namespace) -> tuple[Decoder, Rows, Rows]:
    """Initial model in float32, training rows, and held-out rows; a new tokenizer is written into ``--out``.

    Raises InputError for a wrong model, text or folder.
    """
    out, start = options.out, options.start_from
    config = parse_config(read_json(Path(start) / "config.json" if start else options.config))
    if options.context > config.max_positions:
        raise InputError(f"--context {options.context} is more than the config's {config.max_positions} positions")
    if not (out / TRAINING).exists() and (out / "config.json").exists():
        raise InputError(f"{out} holds a model that train.py did not make: give another --out")
    documents = read_documents(options.data)
    if not options.tokenizer and not (out / STATE).exists():
        (out / TRAINING).mkdir(parents=True, exist_ok=True)
        train_tokenizer(documents, options.vocab_size, out)
    tokenizer = Tokenizer(Path(options.tokenizer or out))
    rows = rows_of(documents, tokenizer, options.context)
    if start:
        return load_model(Path(start), torch.float32), *rows
    model = build(replace(config, vocab_size=len(tokenizer.pieces)))
    model.initialise(std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed))
    return model, *rows


def save_run(options: argparse.Namespace, model: Decoder, state: dict[str, Any]) -> None:
    """Write ``model`` as an ordinary bf16 folder, the log, and the ``state`` to continue from, each file atomically.

    The state holds the ``records`` of the log. A run that is killed before the state is written repeats the last steps.
    Raises InputError when ``--out`` cannot be written.
    """
    published = build(model.config).to(torch.bfloat16)
    published.load_state_dict(model.state_dict())
    save_model(published, options.out, tokenizer_from=Path(options.tokenizer or options.out))
    trouble = f"{options.out / TRAINING} cannot be written, the last saved state is kept; free some space and run again"
    with explaining(trouble, (OSError, RuntimeError)):
        with atomic_path(options.out / LOG) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in state["records"]), encoding="utf-8")
        with atomic_path(options.out / STATE) as temporary:
            torch.save(state, temporary)


def load_state(options: argparse.Namespace) -> dict[str, Any]:
    """State saved in ``--out``, that of step 0 where there is none. Raises InputError for a run with other options."""
    given = {name: str(value) for name, value in vars(options).items()}
    if not (options.out / STATE).exists():
        return {"options": given, "step": 0, "records": [], "parts": []}
    state = torch.load(options.out / STATE, map_location="cpu", weights_only=True)
    for name, value in given.items():
        if (saved := state["options"].get(name)) != value:
            raise InputError(f"{options.out} holds a run with {name} {saved}: give the same, or another --out")
    return state
