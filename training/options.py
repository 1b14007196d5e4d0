"""Options of ``train.py``."""

import argparse
from pathlib import Path

from app.parsers import DEVICE, Groups, parser_of, within
from training.recipe import CURRICULA
from weights.load import model_folder

COUNT = within(int, 1)
SHARE = within(float, 0, 1)
RATE = within(float, 0)
OPTIONS: Groups = {
    "": {
        "--data": {
            "type": Path,
            "nargs": "+",
            "required": True,
            "metavar": "FILE",
            "help": ".jsonl or text files",
        },
        "--out": {
            "type": Path,
            "required": True,
            "metavar": "DIR",
            "help": "the model's folder; a run in it is continued",
        },
        "--tokenizer": {
            "metavar": "DIR",
            "help": "a model folder whose tokenizer to use (default: train one)",
        },
        "--vocab-size": {
            "type": within(int, 258),
            "default": 4096,
            "metavar": "N",
            "help": "most tokens of a new tokenizer",
        },
    },
    "the recipe (--layer-dropout 0 --exit-scale 0 --curriculum none: ordinary training)": {
        "--layer-dropout": {
            "type": SHARE,
            "default": 0.1,
            "metavar": "P",
            "help": "p_max, the dropout rate of the last layer",
        },
        "--exit-scale": {
            "type": RATE,
            "default": 1.0,
            "metavar": "E",
            "help": "e_scale, the weight of early exits' losses",
        },
        "--exit-power": {
            "type": SHARE,
            "default": 1.0,
            "metavar": "A",
            "help": "below 1: more weight for the first exits",
        },
        "--exit-teaching": {
            "type": SHARE,
            "default": 0.0,
            "metavar": "A",
            "help": "share of the exits' losses that the last layer teaches",
        },
        "--curriculum": {
            "choices": CURRICULA,
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
        "--batch": {"type": COUNT, "default": 16, "metavar": "N", "help": "rows per micro-batch"},
        "--accumulate": {
            "type": COUNT,
            "default": 1,
            "metavar": "N",
            "help": "micro-batches per step and process",
        },
        "--context": {"type": COUNT, "default": 256, "metavar": "N", "help": "tokens per row"},
        "--learning-rate": {
            "type": RATE,
            "default": 2e-3,
            "metavar": "R",
            "help": "peak of the learning rate",
        },
        "--muon-rate": {
            "type": RATE,
            "default": 0.0,
            "metavar": "R",
            "help": "peak of Muon's rate, for matrices; 0: AdamW only",
        },
        "--warm-up": {
            "type": within(int, 0),
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
            "help": "steps between evaluations, each with a save",
        },
        "--device": DEVICE,
    },
}


def parse_options(arguments: list[str] | None, description: str) -> argparse.Namespace:
    """Parsed options of a command line. Raises InputError for a model folder that is not there."""
    parser = parser_of(OPTIONS, prog="train.py", description=description)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json of a model to train from scratch"
    )
    start.add_argument(
        "--start-from", metavar="DIR", help="a checkpoint to continue from, with its tokenizer"
    )
    options = parser.parse_args(arguments)
    options.start_from = options.start_from and model_folder(options.start_from)
    options.tokenizer = model_folder(options.tokenizer) if options.tokenizer else options.start_from
    return options
