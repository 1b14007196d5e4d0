"""Table of the options of ``generate.py``, and its parser."""

import argparse
from pathlib import Path
from typing import Any

from cli.command_line import OneLineParser
from cli.options import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, parser_of
from decoding.run.chooser import DRAFTERS, GAMMA_LOW_BITS, LONGEST_ADAPTIVE
from decoding.run.writer import GAMMA
from decoding.verify import COUPLINGS
from weights.load import DTYPES

ON_OR_OFF = argparse.BooleanOptionalAction
LIST = {"action": "append", "default": []}
EPILOG = """kinds of draft:
  auto           in each round the best of lowbit, lookup and a layer plan, or none
  none           plain decoding
  lookup         copies what followed the same words earlier in the text
  lowbit         the model with all weights in four bits (--bits)
  exit           the model's first layers (--exit-layer)
  skip           the model without some sublayers, by a layer plan (--plan)
  model          a smaller model with the same tokenizer (--draft-model)
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
            "help": f"{', '.join(DRAFTERS)}, or FILE.py:Class: see below",
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
            "type": int,
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
            "help": "write a moving picture of the run beside plain decoding",
        },
        "--json": {**FLAG, "help": "print one JSON object per text on standard output"},
        "--serve": {
            "metavar": "[HOST:]PORT",
            "help": "serve a page, and clients of OpenAI's API, until Ctrl-C",
        },
        "--interactive": {**FLAG, "help": "hold a conversation, an answer to each line"},
        "--together": {
            "type": int,
            "default": 4,
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
