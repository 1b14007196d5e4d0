"""Table of the options of ``generate.py``, and its parser."""

import argparse
from pathlib import Path
from typing import Any

from cli.options import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, OneLineParser, parser_of
from decoding.run.chooser import DRAFTERS, GAMMA_LOW_BITS, LONGEST_ADAPTIVE
from decoding.run.writer import GAMMA
from decoding.verify import COUPLINGS
from weights.load import DTYPES

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
            "type": int,
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
            "type": int,
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
