"""Options of ``generate.py``: the table of the command line, and the check of values that a call of
Python or a request gives.

Here options have their names and the values that were given, as an argparse Namespace;
``app.request`` reads them into their types.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from app.draft_options import GAMMA_LOW_BITS, KINDS, LONGEST_ADAPTIVE, DraftOptions
from app.files import explaining
from app.parsers import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, OneLineParser, parser_of, within
from app.plan_file import GAMMA
from decoding.verify import COUPLINGS
from model import LOW_BITS, InputError
from weights.load import DTYPES

MOST = 1 << 16  # texts that can be asked for
TOGETHER = 4  # texts that the server writes at once by default
ON_OR_OFF = BooleanOptionalAction
LIST = {"action": "append", "default": []}
DRAFTS = "\n".join(f"  {kind:<15}{description}" for kind, description in KINDS.items())
EPILOG = f"""kinds of draft:
{DRAFTS}
  FILE.py:Class  a drafter of your own

examples:
  python generate.py "Why is the sky blue?" --trace --compare
  python generate.py "Write a short story about a fox." --draft lookup --temperature 0.7 --seed 1
  python generate.py --serve 8000 --model tiny-llama
"""


# Group of --help -> options -> the arguments of argparse's ``add_argument``.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "": {
        "prompt": {"nargs": "?", "help": "the prompt; or give --prompt-file"},
        "--prompt-file": {
            "metavar": "F",
            "help": "read the prompt from a file (-: standard input)",
        },
        "--model": MODEL,
        "--revision": {"metavar": "R", "help": "branch, tag or commit of a model on the hub"},
        "--chat": {"action": ON_OR_OFF, "help": "use the chat template (default: if there is one)"},
        "--system": {"metavar": "S", "help": "system message of the chat"},
    },
    "drafting": {
        "--draft": {
            "default": "auto",
            "metavar": "KIND",
            "help": f"{', '.join(KINDS)}, or FILE.py:Class: see below",
        },
        "--plan": {
            "type": Path,
            "metavar": "FILE",
            "help": "layer plan of skip and auto (default: plan.json in the model's folder)",
        },
        "--exit-layer": {
            "type": int,
            "metavar": "E",
            "help": "number of layers that exit runs (default: half)",
        },
        "--bits": {
            "type": int,
            "choices": LOW_BITS,
            "metavar": "B",
            "help": "bits per weight of lowbit, exit and skip: 4 or 8",
        },
        "--draft-model": {"metavar": "DIR", "help": "folder or name of the model that drafts"},
        "--gamma": {
            "type": int,
            "metavar": "N",
            "help": "most tokens drafted per round, not with auto (default: the plan's with skip,"
            f" {GAMMA_LOW_BITS} with lowbit, else {GAMMA}, or {LONGEST_ADAPTIVE} with --adaptive)",
        },
        "--adaptive": {
            "action": ON_OR_OFF,
            "help": "end a draft after an unsure token (docs/how_it_works.md#draft-lengths)",
        },
        "--min-target-confidence": {
            "type": float,
            "metavar": "X",
            "help": "draft nothing after a token of lower probability"
            " (docs/how_it_works.md#draft-lengths)",
        },
    },
    "sampling": {
        "--max-new-tokens": {
            "type": int,
            "default": 256,
            "metavar": "N",
            "help": "most tokens to write",
        },
        "--temperature": TEMPERATURE,
        "--top-k": {
            "type": int,
            "default": 0,
            "metavar": "K",
            "help": "keep the K likeliest tokens; 0: all",
        },
        "--top-p": {
            "type": float,
            "default": 1.0,
            "metavar": "P",
            "help": "keep the likeliest tokens that have probability P together; 1: all",
        },
        "--min-p": {
            "type": float,
            "default": 0.0,
            "metavar": "P",
            "help": "keep tokens at least P times as likely as the likeliest; 0: all",
        },
        "--repetition-penalty": {
            "type": float,
            "default": 1.0,
            "metavar": "R",
            "help": "make tokens of the text so far less likely, above 1; 1: off",
        },
        "--seed": {
            "type": int,
            "metavar": "S",
            "help": "seed of sampling (default: random, printed)",
        },
        "--coupling": {
            "choices": list(COUPLINGS),
            "help": "rule of verification. race (default): the seed determines the text, whatever"
            " drafts; ratio: accepts more (docs/how_it_works.md#the-race)",
        },
        "--num-samples": {
            "type": within(int, 1, MOST),
            "default": 1,
            "metavar": "N",
            "help": "number of texts, written at once where possible",
        },
        "--stop": {**LIST, "metavar": "STR", "help": "end the text before STR"},
        "--ban": {**LIST, "metavar": "WORD", "help": "never write WORD"},
    },
    "structured output": {
        "--json-schema": {
            "metavar": "FILE_OR_JSON",
            "help": "write JSON of this schema, with its properties in its order",
        },
        "--regex": {"metavar": "R", "help": "write a text that R matches as a whole"},
        "--grammar": {"metavar": "FILE", "help": "write a text of this Lark grammar"},
        "--schema-prompt": {
            "action": ON_OR_OFF,
            "default": True,
            "help": "also tell the model the schema, in the system message of a chat",
        },
    },
    "machine and output": {
        "--device": DEVICE,
        "--dtype": {**DTYPE, "choices": [*DTYPES, "auto"]},
        "--context": {
            "type": int,
            "metavar": "N",
            "help": "most tokens of prompt and text together"
            " (default: the model's; in conversations at most 8192)",
        },
        "--no-compile": {
            **FLAG,
            "help": "run the readable blocks, in plain PyTorch: several times slower",
        },
        "--dry-run": {**FLAG, "help": "only print the memory that the run would take"},
        "--compare": {
            **FLAG,
            "help": "also decode plainly; print the speed-up, and whether texts are equal",
        },
        "--trace": {**FLAG, "help": "show which drafted tokens were accepted, in colour"},
        "--html": {
            "type": Path,
            "metavar": "FILE",
            "help": "write a page that replays the run round by round",
        },
        "--svg": {
            "type": Path,
            "metavar": "FILE",
            "help": "write a moving picture of the first text beside plain decoding",
        },
        "--json": {**FLAG, "help": "print one JSON object per text on standard output"},
        "--serve": {
            "metavar": "[HOST:]PORT",
            "help": "serve a page, and clients of OpenAI's API, until Ctrl-C",
        },
        "--interactive": {**FLAG, "help": "hold a conversation, an answer to each line"},
        "--together": {
            "type": within(int, 1, MOST),
            "default": TOGETHER,
            "metavar": "N",
            "help": "most texts that --serve writes at once",
        },
    },
}


def make_parser() -> OneLineParser:
    """Parser of the command line."""
    return parser_of(
        OPTIONS,
        prog="generate.py",
        description="Write text with a language model, by self-speculative decoding.",
        epilog=EPILOG,
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


def merge_options(known: Namespace, given: Mapping[str, Any]) -> Namespace:
    """The ``known`` options, with those ``given`` to a call or in a request in their place.

    Another kind of draft comes without the known options of drafting, and a grammar without the
    known one. Raises InputError as ``check_option`` does.
    """
    for name, value in given.items():
        check_option(name, value)
    kept = dict(vars(known))
    if given.get("draft", kept["draft"]) != kept["draft"]:
        kept |= dict.fromkeys(DRAFTING)
    if any(given.get(name) is not None for name in GRAMMARS):
        kept |= dict.fromkeys(GRAMMARS)
    return Namespace(**kept | given)


def check_option(name: str, value: Any) -> None:
    """Raises InputError for a name that is no option of a call, and for a value of another type
    than on the command line.

    ``stop`` and ``ban`` are lists of strings; a JSON schema may also be a dictionary. None stands
    for an option that is not given, where that is its default.
    """
    if name not in OF_A_CALL:
        raise InputError(f"there is no option {name}: see python generate.py --help")
    with explaining(f"{name} is too large", (ValueError, RecursionError), name):
        shown = f"{value!r:.80}"
    settings = OF_A_CALL[name]
    default = settings.get("default")
    if "choices" in settings:
        fits = value in settings["choices"]
        wanted = f"one of {', '.join(map(str, settings['choices']))}"
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
        raise InputError(f"{name} must be {wanted}, found {shown}", name)
    if isinstance(value, str | list):
        with explaining(f"{name} is not UTF-8 text", (UnicodeEncodeError,), name):
            "".join(value).encode()
