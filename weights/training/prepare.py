"""What a run needs before its first step: tokenizer, token files and model. A start that fails leaves no trace."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from model import Decoder, InputError, build, parse_config
from weights.cli.files import one_line, read_json
from weights.load import load_model
from weights.names import model_folder
from weights.save import TOKENIZER_FILES, copy_tokenizer
from weights.tokenizer import Tokenizer
from weights.training.corpus import TOKEN_FILES, Tokens, check_held_out, read_documents, tokenized, train_tokenizer
from weights.training.processes import Group
from weights.training.state import STATE

TRAINING = "training"  # the folder beside the weights


def tokenizer_source(options: argparse.Namespace) -> Path | None:
    """The model folder whose tokenizer the run takes over; None where it learns its own."""
    named = options.start_from or options.tokenizer
    return model_folder(named) if named else None


def prepare(options: argparse.Namespace, group: Group) -> tuple[Tokens, Decoder]:
    """The text as token files in the run's folder, beside their tokenizer, and the float32 model to begin with.

    The first process writes the files, the others find them. Raises InputError for what cannot be trained.
    """
    documents = read_documents(options.data)
    check_held_out(documents)
    start, source = options.start_from and model_folder(options.start_from), tokenizer_source(options)
    raw = read_json(start / "config.json" if start else options.config)
    if not start and isinstance(raw, dict):
        raw["vocab_size"] = 1  # refuse the rest of it before a tokenizer is learnt, which then counts its tokens
    config = parse_config(raw)
    if options.context > config.max_positions:
        raise InputError(f"--context {options.context} is more than the config's {config.max_positions} positions")
    with group.leader_first():
        try:
            if group.leads and not _goes_on(options.out, source):
                (options.out / TRAINING).mkdir(parents=True, exist_ok=True)
                for name in TOKENIZER_FILES:  # of a start that was killed
                    (options.out / name).unlink(missing_ok=True)
                if source:
                    copy_tokenizer(source, options.out)
                else:
                    train_tokenizer(documents, options.vocab_size, options.out)
            tokenizer = Tokenizer(source or options.out)
            if not start:
                config = replace(config, vocab_size=len(tokenizer.vocabulary.pieces))
            tokens = tokenized(documents, tokenizer, config.vocab_size, options.out / TRAINING)
        except OSError as error:
            raise InputError(f"--out {options.out} cannot be written: {one_line(error)}") from None
    if min(len(tokens.train), len(tokens.held_out)) <= options.context:
        raise InputError(
            f"the data have {len(tokens.train)} tokens and {len(tokens.held_out)} held out: too few for "
            f"--context {options.context}; add text, or lower it"
        )
    if start:
        return tokens, load_model(start, torch.float32)
    model = build(config)
    model.initialise(std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed))
    return tokens, model


def _goes_on(out: Path, source: Path | None) -> bool:
    """Whether ``out`` holds a run to continue. Raises InputError when it holds what this run must not replace."""
    if source and source.resolve() == out.resolve():
        raise InputError("--out must be another folder than --start-from and --tokenizer")
    if not (out / TRAINING).exists() and any((out / name).exists() for name in ("config.json", *TOKENIZER_FILES)):
        raise InputError(f"{out} holds a model that train.py did not make: give another --out")
    goes_on = (out / STATE).exists()
    if goes_on and source and Tokenizer(source).vocabulary.pieces != Tokenizer(out).vocabulary.pieces:
        raise InputError(f"{out} holds a run with another tokenizer than {source}: give the same, or another --out")
    return goes_on


@contextmanager
def take_back(out: Path, group: Group) -> Iterator[Callable[[], None]]:
    """When the block fails, remove what ``prepare`` has made in it, unless the block has called what this yields."""
    files = [*(out / name for name in TOKENIZER_FILES), *(out / TRAINING / name for name in TOKEN_FILES)]
    made = [path for path in (*files, out / TRAINING, out, *out.parents) if group.leads and not os.path.lexists(path)]
    try:
        yield made.clear
    except BaseException:
        for path in made:
            with suppress(OSError):  # not made, or a folder into which somebody else has put something
                path.rmdir() if path.is_dir() else path.unlink()
        raise
