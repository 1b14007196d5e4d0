"""Table of the options of ``generate.py``, its parser, and the check of options that a call of
Python or a request gives.
"""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from cli.command_line import OneLineParser
from cli.files import explaining
from cli.options import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, parser_of, within
from decoding.run.chooser import DRAFTERS, GAMMA_LOW_BITS, LONGEST_ADAPTIVE, DraftOptions
from decoding.run.writer import GAMMA
from decoding.verify import COUPLINGS
from model import InputError
from weights.load import DTYPES

MOST = 1 << 16  # texts that can be asked for
ON_OR_OFF = argparse.BooleanOptionalAction
LIST = {"action": "append", "default": []}
EXAMPLES = """examples:
  python generate.py "Why is the sky blue?" --trace --compare
  python generate.py "Write a short story about a fox." --draft lookup --temperature 0.7 --seed 1
  python generate.py --serve 8000 --model tiny-llama
"""


# Group of --help -> options -> the arguments of argparse's ``add_argument``.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "": {
        "prompt": {"nargs": "?", "help": "the prompt, or give --prompt-file"},
        "--prompt-file": {
            "metavar": "F",
            "help": "read the prompt from a file (-: standard input)",
        },
        "--model": MODEL,
        "--revision": {"metavar": "R", "help": "branch, tag or commit of a model on the hub"},
        "--chat": {"action": ON_OR_OFF, "help": "as a chat (default: if the model can)"},
        "--system": {"metavar": "S", "help": "system message of the chat"},
    },
    "drafting": {
        "--draft": {
            "default": "auto",
            "metavar": "KIND",
            "help": f"{', '.join(DRAFTERS)}, or FILE.py:Class",
        },
        "--plan": {
            "type": Path,
            "metavar": "FILE",
            "help": "layer plan of --draft skip or auto",
        },
        "--exit-layer": {
            "type": int,
            "metavar": "E",
            "help": "layers that --draft exit runs (default: half)",
        },
        "--bits": {
            "type": int,
            "metavar": "B",
            "help": "lowbit, exit, skip: draft with weights in 4 or 8 bits",
        },
        "--draft-model": {"metavar": "DIR", "help": "the model of --draft model"},
        "--gamma": {
            "type": int,
            "metavar": "N",
            "help": f"most tokens drafted per round, not with auto (default: the plan's, of lowbit"
            f" {GAMMA_LOW_BITS}, else {GAMMA}, with --adaptive {LONGEST_ADAPTIVE})",
        },
        "--adaptive": {
            "action": ON_OR_OFF,
            "help": "end a draft after an unsure token (docs/how_it_works.md#the-loop)",
        },
        "--min-target-confidence": {
            "type": float,
            "metavar": "X",
            "help": "no draft after a less sure token (docs/how_it_works.md#the-loop)",
        },
    },
    "sampling": {
        "--max-new-tokens": {
            "type": int,
            "default": 256,
            "metavar": "N",
            "help": "most tokens of a text",
        },
        "--temperature": TEMPERATURE,
        "--top-k": {"type": int, "default": 0, "metavar": "K", "help": "0: off"},
        "--top-p": {"type": float, "default": 1.0, "metavar": "P", "help": "1: off"},
        "--min-p": {"type": float, "default": 0.0, "metavar": "P", "help": "0: off"},
        "--repetition-penalty": {
            "type": float,
            "default": 1.0,
            "metavar": "R",
            "help": "1: off",
        },
        "--seed": {"type": int, "metavar": "S", "help": "(default: random)"},
        "--coupling": {
            "choices": list(COUPLINGS),
            "help": "race (default): the seed determines the text, whatever drafts; ratio: accepts"
            " more (docs/how_it_works.md#the-race)",
        },
        "--num-samples": {
            "type": within(int, 1, MOST),
            "default": 1,
            "metavar": "N",
            "help": "texts, together where possible",
        },
        "--stop": {**LIST, "metavar": "STR", "help": "end the text before STR"},
        "--ban": {**LIST, "metavar": "WORD", "help": "never write WORD"},
    },
    "structured output": {
        "--json-schema": {
            "metavar": "FILE_OR_JSON",
            "help": "write JSON of this schema, properties in its order, with ', ' and ': '",
        },
        "--regex": {"metavar": "R", "help": "write a text that matches all of R"},
        "--grammar": {"metavar": "FILE", "help": "write a text of this Lark grammar"},
        "--schema-prompt": {
            "action": ON_OR_OFF,
            "default": True,
            "help": "tell the model the schema in the system message of a chat",
        },
    },
    "machine and output": {
        "--device": DEVICE,
        "--dtype": {**DTYPE, "choices": [*DTYPES, "auto"]},
        "--context": {
            "type": int,
            "metavar": "N",
            "help": "most tokens of prompt and text"
            " (default: the model's, of conversations at most 8192)",
        },
        "--no-compile": {**FLAG, "help": "use the readable blocks, several times slower"},
        "--dry-run": {**FLAG, "help": "print the memory it would take, and load nothing"},
        "--compare": {**FLAG, "help": "write both ways in turns; print speed-up and equality"},
        "--trace": {**FLAG, "help": "show drafted tokens and their verdicts, in colour"},
        "--html": {
            "type": Path,
            "metavar": "FILE",
            "help": "write a page that replays the run round by round",
        },
        "--svg": {
            "type": Path,
            "metavar": "FILE",
            "help": "write a moving picture of the run beside plain decoding",
        },
        "--json": {**FLAG, "help": "one JSON object per sample on standard output"},
        "--serve": {
            "metavar": "[HOST:]PORT",
            "help": "a page and OpenAI's endpoints, until Ctrl-C",
        },
        "--interactive": {**FLAG, "help": "a conversation: a line, an answer, a line ..."},
        "--together": {
            "type": within(int, 1, MOST),
            "default": 4,
            "metavar": "N",
            "help": "texts that --serve writes at once",
        },
    },
}


def make_parser() -> OneLineParser:
    """Parser of the command line."""
    return parser_of(
        OPTIONS,
        prog="generate.py",
        description="Write text with a checkpoint, speculatively or not.",
        epilog=EXAMPLES,
    )


# Options of a command line alone: its prompt, the number of its texts, and its output.
NOT_FROM_PYTHON = {
    "prompt",
    "prompt_file",
    "num_samples",
    "dry_run",
    "compare",
    "trace",
    "html",
    "svg",
    "json",
    "serve",
    "together",
    "interactive",
}
# Options of a call of Python, with the arguments of argparse's ``add_argument``.
OF_A_CALL: dict[str, dict[str, Any]] = {
    name: settings
    for group in OPTIONS.values()
    for option, settings in group.items()
    if (name := option.removeprefix("--").replace("-", "_")) not in NOT_FROM_PYTHON
}
# Options that a model is loaded with.
OF_THE_MODEL = ("model", "revision", "device", "dtype", "context", "no_compile")
DRAFTING = [field.name for field in fields(DraftOptions)[1:]]  # options of a kind of draft
GRAMMARS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}  # option: kind
# Types of an option's values, by its type on the command line, and their name in messages.
TYPES = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    Path: (str | Path, "a string"),
    None: (str | Path, "a string"),
}


def merge_options(known: argparse.Namespace, given: Mapping[str, Any]) -> argparse.Namespace:
    """The ``known`` options, with those ``given`` to a call or in a request in their place.

    Another kind of draft comes without the known options of drafting, and a grammar without the
    known one. Raises InputError as ``check_option`` does.
    """
    for name, value in given.items():
        check_option(name, value)
    kept = dict(vars(known))
    if given.get("draft", kept["draft"]) != kept["draft"]:
        kept |= dict.fromkeys(DRAFTING)
    if GRAMMARS.keys() & given.keys():
        kept |= dict.fromkeys(GRAMMARS)
    return argparse.Namespace(**kept | given)


def check_option(name: str, value: Any) -> None:
    """Raises InputError for a name that is no option of a call, and for a value of another type
    than on the command line.

    ``stop`` and ``ban`` are lists of strings; a JSON schema may also be a dictionary. None stands
    for an option that is not given, where that is its default.
    """
    if name not in OF_A_CALL:
        raise InputError(f"there is no option {name}: see python generate.py --help")
    with explaining(f"{name} is too large", (ValueError, RecursionError)):
        shown = f"{value!r:.80}"
    settings = OF_A_CALL[name]
    default = settings.get("default")
    if "choices" in settings:
        fits = value in settings["choices"]
        wanted = f"one of {', '.join(settings['choices'])}"
    elif isinstance(default, list):
        fits = isinstance(value, list) and all(isinstance(each, str) for each in value)
        wanted = "a list of strings"
    elif "action" in settings:
        fits = isinstance(value, bool)
        wanted = "True or False"
    else:
        types, wanted = TYPES[settings.get("type")]
        fits = isinstance(value, types) and not isinstance(value, bool)
    is_schema = name == "json_schema" and isinstance(value, dict)
    is_default = value is None and default is None
    if not (fits or is_schema or is_default):
        raise InputError(f"{name} must be {wanted}, found {shown}")
    if isinstance(value, str | list):
        with explaining(f"{name} is not UTF-8 text", (UnicodeEncodeError,)):
            "".join(value).encode()
