"""Runs of ``train.py``: their options, what they begin with, and the folder they are saved in.

Knows nothing of losses.
"""

import argparse
import copy
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim import Optimizer

from app.common.files import atomic_path, read_json, read_text, write_text
from app.common.parsers import DEVICE, Groups, parser_of, within
from model.config import parse_config
from model.decoder import Decoder
from model.errors import InputError, explaining
from training.recipe import CURRICULA
from training.text import Rows, read_documents, rows_of, train_tokenizer
from weights.checkpoint import save_model
from weights.load import load_model, model_fingerprint, model_folder
from weights.tokenizer import Tokenizer

STATE = "training/state.pt"
LOG = "training/log.jsonl"
# Options that may differ when a run is continued
NOT_OF_THE_RUN = ("out", "device", "save_every")
# Options of files, which are compared by what they hold
OF_FILES = ("data", "config", "start_from")
COUNT = within(int, 1, 2**31 - 1)
OPTIONS: Groups = {
    "": {
        "--data": {
            "type": Path,
            "nargs": "+",
            "required": True,
            "metavar": "FILE",
            "help": 'documents, one a line: {"text": ...} or {"prompt": ..., "response": ...}',
        },
        "--out": {
            "type": Path,
            "required": True,
            "metavar": "DIR",
            "help": "the model's folder; a run in it is continued",
        },
        "--config": {
            "type": Path,
            "metavar": "FILE",
            "help": "config.json of a model to train from scratch, with a tokenizer of its own",
        },
        "--start-from": {
            "metavar": "DIR",
            "help": "a checkpoint to continue from instead, with its tokenizer",
        },
        "--vocab-size": {
            "type": within(int, 258, 2**24),  # the trainer has memory for all of them
            "default": 4096,
            "metavar": "N",
            "help": "most tokens of a new tokenizer",
        },
    },
    "the recipe (--layer-dropout 0 --exit-scale 0: ordinary training)": {
        "--layer-dropout": {
            "type": within(float, 0, 1),
            "default": 0.1,
            "metavar": "P",
            "help": "p_max, the dropout rate of the last layer",
        },
        "--exit-scale": {
            "type": within(float, 0),
            "default": 1.0,
            "metavar": "E",
            "help": "e_scale, the weight of early exits' losses",
        },
        "--exit-power": {
            "type": within(float, 0, 1),
            "default": 1.0,
            "metavar": "A",
            "help": "below 1: more weight for the first exits",
        },
        "--exit-teaching": {
            "type": within(float, 0, 1),
            "default": 0.0,
            "metavar": "A",
            "help": "share of the exits' losses that the last layer teaches",
        },
        "--curriculum": {
            "choices": list(CURRICULA),
            "default": "rotational",
            "help": "which exits are on in a step",
        },
        "--rotation": {
            "type": COUNT,
            "default": 8,
            "metavar": "R",
            "help": "every R-th layer's exit is on in a step",
        },
    },
    "the loop": {
        "--steps": {
            "type": COUNT,
            "default": 2000,
            "metavar": "N",
            "help": "updates of the weights",
        },
        "--batch": {
            "type": COUNT,
            "default": 16,
            "metavar": "N",
            "help": "rows per micro-batch",
        },
        "--accumulate": {
            "type": COUNT,
            "default": 1,
            "metavar": "N",
            "help": "micro-batches per step",
        },
        "--context": {
            "type": COUNT,
            "default": 256,
            "metavar": "N",
            "help": "tokens per row",
        },
        "--learning-rate": {
            "type": within(float, 0),
            "default": 2e-3,
            "metavar": "R",
            "help": "peak of the learning rate",
        },
        "--muon-rate": {
            "type": within(float, 0),
            "default": 0.0,
            "metavar": "R",
            "help": "peak of Muon's rate, for matrices; 0: AdamW only",
        },
        "--warm-up": {
            "type": within(int, 0, 2**31 - 1),
            "default": 100,
            "metavar": "N",
            "help": "steps until the peak",
        },
        "--seed": {
            "type": within(int, 0, 2**63 - 1),
            "default": 0,
            "metavar": "S",
            "help": "of every random choice",
        },
        "--autocast": {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "compute in bf16",
        },
        "--save-every": {
            "type": COUNT,
            "default": 100,
            "metavar": "N",
            "help": "steps between evaluations, each with a save; others come after 30 seconds, a"
            " minute, two ...",
        },
        "--device": DEVICE,
    },
}


@dataclass
class Run:
    """State of a run without its model and optimisers: the options that it was begun with, as text,
    the number of steps that are done, and the records of its log.
    """

    options: dict[str, str]
    step: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)


def prepare_run(options: argparse.Namespace) -> tuple[Decoder, Rows, Rows, Path]:
    """Return the initial model in float32, training rows, held-out rows, and the folder of the
    tokenizer. A new tokenizer is written into ``--out``, once the text is known to suffice.

    Raises InputError for a wrong model, text or folder.
    """
    if (options.config is None) == (not options.start_from):
        raise InputError("give either --config or --start-from")
    start = model_folder(options.start_from) if options.start_from else None
    config = parse_config(read_json(start / "config.json" if start else options.config))
    if options.context > config.max_positions:
        raise InputError(
            f"--context {options.context} is more than the config's {config.max_positions}"
            " positions"
        )
    if (options.out / "config.json").exists() and not (options.out / STATE).exists():
        raise InputError(
            f"{options.out} holds a model without the state of a run: give another --out"
        )
    documents = read_documents(options.data)
    with TemporaryDirectory() as scratch:
        tokenizer = tokenizer_of(options, start, documents, Path(scratch))
        rows = rows_of(documents, tokenizer, options.context)
        # A new tokenizer is copied from there now: a text that is refused leaves no files.
        for file in Path(scratch).iterdir():
            write_text(options.out / file.name, read_text(file))
    if start:
        return load_model(start, torch.float32), *rows, start
    model = Decoder(replace(config, vocab_size=len(tokenizer.pieces)))
    model.initialise(
        std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed)
    )
    return model, *rows, options.out


def tokenizer_of(
    options: argparse.Namespace, start: Path | None, documents: Sequence[str], scratch: Path
) -> Tokenizer:
    """Return the tokenizer of a run: that of the checkpoint which it starts from, that of the run
    in ``--out``, or a new one for its documents, written into ``scratch``.
    """
    if start:
        return Tokenizer(start)
    if (options.out / STATE).exists():
        return Tokenizer(options.out)
    train_tokenizer(documents, options.vocab_size, scratch)
    return Tokenizer(scratch)


def load_run(
    options: argparse.Namespace,
    model: Decoder,
    optimisers: Sequence[Optimizer],
    rows: Rows,
    tokenizer_from: Path,
) -> Run:
    """Return the run in ``--out``, or a new one. The model and its optimisers get what was saved of
    them. ``tokenizer_from`` is the folder of the checkpoint, if the run starts from one, and
    otherwise ``--out``.

    An option that the saved run did not know yet counts as its default. Raises InputError for a
    damaged state, and for a run with other options, another text, config or checkpoint: files are
    compared by what they hold.
    """
    config = json.dumps(model.config.source, sort_keys=True)
    given = {
        name: str(value) for name, value in vars(options).items() if name not in NOT_OF_THE_RUN
    } | {
        "data": rows.checksum,
        "config": f"{zlib.crc32(config.encode()):08x}",
        "start_from": str(options.start_from and model_fingerprint(tokenizer_from)),
    }
    if not (options.out / STATE).exists():
        return Run(given)
    parser = parser_of(OPTIONS)
    with explaining(f"{options.out / STATE} is damaged: give another --out", (Exception,)):
        state = dict(torch.load(options.out / STATE, map_location="cpu", weights_only=True))
        for name in given | state["options"]:
            value = state["options"].get(name, str(parser.get_default(name)))
            if given.get(name) != value:
                option = f"--{name.replace('_', '-')}"
                found = f"other contents of {option}" if name in OF_FILES else f"{option} {value}"
                raise InputError(
                    f"{options.out} holds a run with {found}: give the same, or another --out"
                )
        model.load_state_dict(state.pop("model"))
        for optimiser, values in zip(optimisers, state.pop("optimisers"), strict=True):
            optimiser.load_state_dict(values)
        return Run(**state)


def save_run(
    out: Path, model: Decoder, optimisers: Sequence[Optimizer], run: Run, tokenizer_from: Path
) -> None:
    """Write the model as an ordinary bf16 folder, and the log and the state to continue from, each
    file atomically. The state takes its place last, but its space first: a full disk leaves no
    model without a state. Nor does Ctrl-C during the first save.

    A run that is killed before that repeats the last steps. Raises InputError when ``out`` cannot
    be written.
    """
    try:
        with (
            explaining(
                f"{out / STATE} cannot be written, the last saved state is kept; free some space"
                " and run again",
                (OSError, RuntimeError),
            ),
            atomic_path(out / STATE) as temporary,
        ):
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimisers": [each.state_dict() for each in optimisers],
                    **vars(run),
                },
                temporary,
            )
            write_text(out / LOG, "".join(f"{json.dumps(each)}\n" for each in run.records))
            save_model(copy.deepcopy(model).bfloat16(), out, tokenizer_from=tokenizer_from)
    finally:
        # Interrupted in the first save: a run begins only in a folder without a model.
        if (out / "config.json").exists() and not (out / STATE).exists():
            (out / "config.json").unlink()
