"""Runs of ``train.py``: their options, what they begin with, and the folder they are saved in.

Computes no losses.
"""

import argparse
import copy
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim import Optimizer

from app.common.files import atomic_path, check_place, read_json, read_text, write_text
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
# Options of files, which are compared first, by what they hold. A run's own model has another
# config than the one it began with, so where a run starts from comes before.
OF_FILES = ("start_from", "data", "config")
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


def prepare_run(options: argparse.Namespace) -> tuple[Decoder, Rows, Rows, Path | None]:
    """Return the initial model in float32, training rows, held-out rows, and the folder of the
    checkpoint if the run starts from one. A new tokenizer is written into ``--out``.

    Raises InputError for a wrong model, text or folder.
    """
    nearest = next(folder for folder in (options.out, *options.out.parents) if folder.exists())
    check_place(nearest / "config.json")  # missing folders are made in it
    if (options.config is None) == (not options.start_from):
        raise InputError("give either --config or --start-from")
    if options.start_from and options.vocab_size != OPTIONS[""]["--vocab-size"]["default"]:
        raise InputError("--start-from brings its tokenizer: leave out --vocab-size")
    checkpoint = model_folder(options.start_from) if options.start_from else None
    config = parse_config(read_json(checkpoint / "config.json" if checkpoint else options.config))
    if options.context > config.max_positions:
        raise InputError(
            f"--context {options.context} is more than the config's {config.max_positions}"
            " positions"
        )
    if (options.out / "config.json").exists() and not (options.out / STATE).exists():
        raise InputError(
            f"{options.out} holds a model without the state of a run: give another --out"
        )
    tokenizer, rows = tokenizer_and_rows(options, checkpoint)
    if checkpoint:
        return load_model(checkpoint, torch.float32), *rows, checkpoint
    model = Decoder(replace(config, vocab_size=len(tokenizer.pieces)))
    model.initialise(
        std=0.5 * config.hidden_size**-0.5, generator=torch.Generator().manual_seed(options.seed)
    )
    return model, *rows, None


def tokenizer_and_rows(
    options: argparse.Namespace, checkpoint: Path | None
) -> tuple[Tokenizer, tuple[Rows, Rows]]:
    """Return the tokenizer of a run, and its training and held-out rows.

    The tokenizer is that of the ``checkpoint``, or that of the run in ``--out``. Without
    both a new one is trained, and written into ``--out``. Raises InputError for a wrong text.
    """
    documents = read_documents(options.data)
    if checkpoint or (options.out / STATE).exists():
        tokenizer = Tokenizer(checkpoint or options.out)
        return tokenizer, rows_of(documents, tokenizer, options.context)
    with TemporaryDirectory() as scratch:  # a text that is refused leaves no files in --out
        train_tokenizer(documents, options.vocab_size, Path(scratch))
        tokenizer = Tokenizer(Path(scratch))
        rows = rows_of(documents, tokenizer, options.context)
        for file in Path(scratch).iterdir():
            write_text(options.out / file.name, read_text(file))
    return tokenizer, rows


def load_run(
    options: argparse.Namespace,
    model: Decoder,
    optimisers: Sequence[Optimizer],
    texts: Sequence[Rows],
    checkpoint: Path | None,
) -> Run:
    """Return the run in ``--out``, or a new one. The model and its optimisers get what was saved of
    them. ``texts`` are the training rows and the held-out rows, ``checkpoint`` is the folder of the
    checkpoint, if the run starts from one.

    Raises InputError for a damaged state, and for a run with other options.
    """
    given = {
        name: str(value) for name, value in vars(options).items() if name not in NOT_OF_THE_RUN
    } | {
        "data": " ".join(rows.checksum for rows in texts),
        "config": f"{zlib.crc32(json.dumps(model.config.source, sort_keys=True).encode()):08x}",
        "start_from": str(checkpoint and model_fingerprint(checkpoint)),
    }
    if not (options.out / STATE).exists():
        return Run(given)
    damaged = f"{options.out / STATE} is damaged: give another --out"
    with explaining(damaged, (Exception,)):  # the file may hold anything
        state = dict(torch.load(options.out / STATE, map_location="cpu", weights_only=True))
        saved = dict(state["options"])
    check_same_options(options.out, saved, given)
    with explaining(damaged, (Exception,)):
        model.load_state_dict(state.pop("model"))
        for optimiser, values in zip(optimisers, state.pop("optimisers"), strict=True):
            optimiser.load_state_dict(values)
        return Run(**state)


def check_same_options(out: Path, saved: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise InputError where the run in ``out`` was begun with other options, another text, config
    or checkpoint than are given now: files are compared by what they hold.

    An option that the saved run did not know yet counts as its default.
    """
    parser = parser_of(OPTIONS)
    for name in dict.fromkeys((*OF_FILES, *given, *saved)):
        value = saved.get(name, str(parser.get_default(name)))
        if given.get(name) != value:
            shown = "of other contents" if name in OF_FILES and value != "None" else value
            raise InputError(
                f"{out} holds a run with --{name.replace('_', '-')} {shown}: give the same, or"
                " another --out"
            )


def save_run(
    out: Path, model: Decoder, optimisers: Sequence[Optimizer], run: Run, checkpoint: Path | None
) -> None:
    """Write the state to continue from, the log, and the model as an ordinary bf16 folder with the
    tokenizer of the ``checkpoint``. Each file is written atomically.

    The state comes first: a model without one would belong to no run. Where the rest is missing,
    because the run was killed or the disk is full, the next save writes it. Raises InputError when
    ``out`` cannot be written.
    """
    with (
        explaining(
            f"{out / STATE} cannot be written, the last saved state is kept; free some space and"
            " run again",
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
    save_model(copy.deepcopy(model).bfloat16(), out, tokenizer_from=checkpoint)
