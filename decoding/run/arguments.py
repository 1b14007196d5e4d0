"""Options of ``generate.py``, by which calls from Python are checked too.

The groups of options are those of ``--help``.
"""

import argparse
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.command_line import OneLineParser
from decoding.run.chooser import DRAFTERS
from decoding.verify import COUPLINGS
from model import InputError
from weights.load import DTYPES

DESCRIPTION = """Write text with a checkpoint, speculatively or not."""
# Options that say what a command prints, or that a call's form says: no options of a call.
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
# Types of an option's values, by its type on the command line, and their name in messages.
TYPES = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    None: (str | Path, "a string"),
}
COUPLING = (
    "race (default): the seed determines the text, whatever drafts; ratio: accepts"
    " more (docs/how_it_works.md#the-race)"
)
EXAMPLES = """examples:
  python generate.py "Why is the sky blue?" --trace --compare
  python generate.py "Write a short story about a fox." --draft lookup --temperature 0.7 --seed 1
  python generate.py --serve 8000 --model tiny-llama
"""


def make_parser() -> OneLineParser:
    """Parser of the command line."""
    parser = OneLineParser(prog="generate.py", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("prompt", nargs="?", help="the prompt, or give --prompt-file")
    parser.add_argument(
        "--prompt-file", metavar="F", help="read the prompt from a file (-: standard input)"
    )
    parser.add_argument(
        "--model",
        default="smollm2-135m-instruct",
        help="a folder, a name under weights/, or ORG/NAME on the Hugging Face hub",
    )
    parser.add_argument(
        "--revision", metavar="R", help="branch, tag or commit of a model on the hub"
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="as a chat (default: if the model can)",
    )
    parser.add_argument("--system", metavar="S", help="system message of the chat")
    draft = parser.add_argument_group("drafting")
    draft.add_argument(
        "--draft", default="auto", metavar="KIND", help=f"{', '.join(DRAFTERS)}, or FILE.py:Class"
    )
    draft.add_argument(
        "--plan", type=Path, metavar="FILE", help="layer plan of --draft skip or auto"
    )
    draft.add_argument(
        "--exit-layer", type=int, metavar="E", help="layers that --draft exit runs (default: half)"
    )
    draft.add_argument(
        "--bits",
        type=int,
        metavar="B",
        help="lowbit, exit, skip: draft with weights in 4 or 8 bits",
    )
    draft.add_argument("--draft-model", metavar="DIR", help="the model of --draft model")
    draft.add_argument(
        "--gamma",
        type=int,
        metavar="N",
        help="tokens drafted per round (default: the plan's, else 4)",
    )
    draft.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        help="end a draft after an unsure token (docs/how_it_works.md#the-loop)",
    )
    draft.add_argument(
        "--min-target-confidence",
        type=float,
        metavar="X",
        help="no draft after a less sure token (docs/how_it_works.md#the-loop)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="most tokens of a text"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    sampling.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off"
    )
    sampling.add_argument("--seed", type=int, metavar="S", help="(default: random)")
    sampling.add_argument("--coupling", choices=list(COUPLINGS), help=COUPLING)
    sampling.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="texts, together where possible"
    )
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="STR", help="end the text before STR"
    )
    sampling.add_argument(
        "--ban", action="append", default=[], metavar="WORD", help="never write WORD"
    )
    structure = parser.add_argument_group("structured output")
    grammars = structure.add_mutually_exclusive_group()
    grammars.add_argument(
        "--json-schema",
        metavar="FILE_OR_JSON",
        help="write JSON of this schema, properties in its order, with ', ' and ': '",
    )
    grammars.add_argument("--regex", metavar="R", help="write a text that matches all of R")
    grammars.add_argument("--grammar", metavar="FILE", help="write a text of this Lark grammar")
    structure.add_argument(
        "--schema-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tell the model the schema in the system message of a chat",
    )
    machine = parser.add_argument_group("machine and output")
    machine.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    machine.add_argument(
        "--dtype", choices=[*DTYPES, "auto"], default="auto", help="auto: the checkpoint's"
    )
    machine.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="most tokens of prompt and text (default: the model's, of conversations at most 8192)",
    )
    machine.add_argument(
        "--no-compile", action="store_true", help="use the readable blocks, several times slower"
    )
    machine.add_argument(
        "--dry-run", action="store_true", help="print the memory it would take, and load nothing"
    )
    machine.add_argument(
        "--compare",
        action="store_true",
        help="write both ways in turns; print speed-up and equality",
    )
    machine.add_argument(
        "--trace", action="store_true", help="show drafted tokens and their verdicts, in colour"
    )
    machine.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that replays the run round by round"
    )
    machine.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="write a moving picture of drafting beside plain decoding",
    )
    machine.add_argument(
        "--json", action="store_true", help="one JSON object per sample on standard output"
    )
    machine.add_argument(
        "--serve", metavar="[HOST:]PORT", help="a page and OpenAI's endpoints, until Ctrl-C"
    )
    machine.add_argument(
        "--interactive", action="store_true", help="a conversation: a line, an answer, a line ..."
    )
    machine.add_argument(
        "--together", type=int, default=4, metavar="N", help="texts that --serve writes at once"
    )
    return parser


def checked(given: Mapping[str, Any], known: Namespace) -> Namespace:
    """The options ``known``, with those ``given`` to a call or in a request in their place.

    Their types are those of the command line, ``stop`` and ``ban`` lists of strings. Raises
    InputError for a name that is no option of a call, and for a value of another type.
    """
    actions = {action.dest: action for action in make_parser()._actions}
    for name, value in given.items():
        if name not in actions or name in NOT_FROM_PYTHON:
            raise InputError(f"there is no option {name}: see python generate.py --help")
        action = actions[name]
        fits, wanted = has_type_of(action, value)
        if not fits and (value is not None or action.default is not None):
            raise InputError(f"{name} must be {wanted}, found {value!r:.80}")
    return Namespace(**vars(known) | given)


def has_type_of(action: argparse.Action, value: Any) -> tuple[bool, str]:
    """Whether a value of Python or JSON is one that this option of the command line could have, and
    the type of its values in words.
    """
    if action.choices is not None:
        return value in list(action.choices), f"one of {', '.join(action.choices)}"
    if isinstance(action.default, list):
        fits = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return fits, "a list of strings"
    if action.nargs == 0:
        return isinstance(value, bool), "True or False"
    if action.dest == "json_schema" and isinstance(value, dict):
        return True, "a schema"
    types, words = TYPES.get(action.type, TYPES[None])
    return isinstance(value, types) and not isinstance(value, bool), words
