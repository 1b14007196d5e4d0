"""Options of ``generate.py``: the table and its parser, the check of those that a call of Python or
a request gives, those of a text in their types (``TextOptions``), and the request of a command line
(``Request``), which is checked before any weight is read.
"""

from __future__ import annotations

import json
import math
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cli.device import pick_device
from cli.files import check_place, explaining, read_text
from cli.options import DEVICE, DTYPE, FLAG, MODEL, TEMPERATURE, OneLineParser, parser_of, within
from decoding.break_even import BreakEven
from decoding.grammar import Grammar, Vocabulary
from decoding.run.chooser import (
    DRAFTERS,
    GAMMA_LOW_BITS,
    LONGEST_ADAPTIVE,
    DraftOptions,
    plan_for,
    plans_for_auto,
)
from decoding.run.plan_file import GAMMA
from decoding.run.prompt import check_prompt, checked_prompt, encode_prompt, read_prompt
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS, Coupling
from model import LOW_BITS, InputError
from weights.load import DTYPES, model_folder, pick_dtype, read_config, shown_name
from weights.memory import LONGEST_DRAFT, Memory, estimate, low_bit_bytes
from weights.tokenizer import Tokenizer

MOST = 1 << 16  # texts that can be asked for
TOGETHER = 4  # texts that the server writes at once by default
ON_OR_OFF = BooleanOptionalAction
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
    with explaining(f"{name} is too large", (ValueError, RecursionError)):
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
        raise InputError(f"{name} must be {wanted}, found {shown}")
    if isinstance(value, str | list):
        with explaining(f"{name} is not UTF-8 text", (UnicodeEncodeError,)):
            "".join(value).encode()


# Positions of a cache for texts that are not known yet: on a GPU a step attends over all of them.
CONTEXT = 8192


class TextOptions(NamedTuple):
    """Options of a text in their types: its draft, sampling parameters, rules and seed, and for its
    prompt whether it is a turn of a chat (None: where the model can chat), the system message, and
    the JSON schema that the model is told.
    """

    draft: DraftOptions
    params: SamplingParams
    rules: Rules
    coupling: Coupling
    chat: bool | None
    system: str | None
    schema: str | None

    def encode(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(
            tokenizer, prompt, chat=self.chat, system=self.system, schema=self.schema
        )


def read_grammar_files(options: Namespace) -> Namespace:
    """The command line's options with the contents of the files that --json-schema and --grammar
    name. A schema may also be given itself, from Python as a dictionary too.
    """
    schema = options.json_schema
    if isinstance(schema, dict):
        with explaining("json_schema is no JSON", (TypeError, ValueError, RecursionError)):
            schema = json.dumps(schema)
    elif schema is not None and not str(schema).lstrip().startswith("{"):
        if not str(schema):
            raise InputError("--json-schema is empty: give a file, or a JSON object")
        schema = read_text(schema)
    grammar = options.grammar and read_text(options.grammar)
    return Namespace(**{**vars(options), "json_schema": schema, "grammar": grammar})


@lru_cache(maxsize=1)
def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Tokens of a model of this vocabulary size, as grammars read them."""
    tokens = [tokenizer.token_bytes(token) for token in range(size)]
    return Vocabulary(tokens, tokenizer.eos_ids, tokenizer.encode_continuation)


def check_options(options: Namespace) -> None:
    """Raises InputError for options of a command line that do not go together, for numbers out of
    range, and for files that cannot be written.
    """
    for name in ("system", "regex", "stop", "ban"):
        check_option(name, getattr(options, name))
    if options.context is not None and options.context < 1:
        raise InputError(f"--context must be at least 1, found {options.context}")
    for place in filter(None, (options.html, options.svg)):
        check_place(place)
    of_one_prompt = ("prompt", "prompt_file", "compare", "html", "svg", "json")
    has_prompt = any(map(vars(options).get, of_one_prompt)) or options.num_samples > 1
    if sum(map(bool, (has_prompt, options.interactive, options.serve))) > 1:
        raise InputError(
            "--serve and --interactive stand alone: they take no prompt, --num-samples, --compare,"
            " --html, --svg or --json"
        )
    if options.together != TOGETHER and not options.serve:
        raise InputError("--together is for --serve: leave it out")


class Request:
    """The request of ``generate.py``'s command line, checked before any weight is read.

    ``asked`` has the options of its texts. ``prompt`` and its token ``ids`` are empty where there
    is no prompt, as with --serve. ``name`` is the model's, as it is shown; ``repeat_with`` has the
    options that repeat a sampled text, and is empty for a greedy one. Raises InputError.
    """

    def __init__(self, options: Namespace) -> None:
        check_options(options)
        self.options = options
        self.folder = model_folder(options.model, options.revision)
        self.name = shown_name(self.folder)
        self.device = pick_device(options.device)
        self.config = read_config(self.folder)
        self.dtype = pick_dtype(options.dtype, self.folder, self.device)
        self.tokenizer = Tokenizer(self.folder)
        self.asked = self.text_options(read_grammar_files(options))
        number = f" --num-samples {options.num_samples}" if options.num_samples > 1 else ""
        self.repeat_with = f"{self.asked.coupling}{number}" if options.temperature else ""
        self.prompt = ""
        self.ids: list[int] = []
        has_prompt = options.prompt is not None or options.prompt_file is not None
        if has_prompt or not (options.serve or options.interactive or options.dry_run):
            self.prompt = read_prompt(options.prompt, options.prompt_file)
            self.ids = self.encode(self.prompt, self.asked)

    def text_options(self, options: Namespace, seconds: float = math.inf) -> TextOptions:
        """The options of a text of this model, among those of a call whose files are read.

        ``seconds``: the longest that all masks of a grammar may take. Raises InputError for a value
        out of range, for several grammars, and for a wrong one.
        """
        given = [name for name in GRAMMARS if getattr(options, name) is not None]
        if len(given) > 1:
            raise InputError("give one of --json-schema, --regex and --grammar")
        grammar = None
        for name in given:
            tokens = vocabulary(self.tokenizer, self.config.vocab_size)
            grammar = Grammar(GRAMMARS[name], getattr(options, name), tokens, seconds)
        draft = {name: getattr(options, name) for name in DRAFTING}
        params = {field.name: getattr(options, field.name) for field in fields(SamplingParams)}
        eos_ids = self.tokenizer.eos_ids
        return TextOptions(
            DraftOptions(options.draft, **draft),
            SamplingParams(**params),
            Rules(options.max_new_tokens, eos_ids, options.stop, options.ban, grammar=grammar),
            Coupling.of(options.coupling, options.seed),
            options.chat,
            options.system,
            options.json_schema if options.schema_prompt else None,
        )

    def encode(self, prompt: str, asked: TextOptions) -> list[int]:
        """Token ids of a prompt. Raises InputError for anything but text, and for a prompt that is
        too long for the context.
        """
        ids = asked.encode(self.tokenizer, checked_prompt(prompt))
        check_prompt(ids, self.config, self.folder, self.context)
        return ids

    @property
    def context(self) -> int:
        """Most positions of any text: --context, at most the model's."""
        return min(self.options.context or math.inf, self.config.max_positions)

    @property
    def capacity(self) -> int:
        """Positions of a cache: for the prompt and its output or, where texts are not known yet,
        for the context, of at most ``CONTEXT`` unless --context is given.
        """
        wanted = len(self.ids) + self.asked.rules.max_new_tokens
        if not self.prompt:
            wanted = self.options.context or CONTEXT
        return min(wanted, self.context)

    def needs(self) -> dict[str, Any]:
        """Arguments of ``weights.memory.estimate`` besides the config and the device.

        The plans of ``auto`` are not counted: they are used only if their low-bit copies fit.
        Raises InputError for a draft model or a plan that cannot be read.
        """
        draft = self.asked.draft
        chosen = plan_for(draft, self.folder, self.config.num_layers)
        is_auto = draft.kind == "auto"
        longest = BreakEven.LONGEST_WITH_FORCED if is_auto else LONGEST_DRAFT
        return {
            "dtype": self.dtype,
            "positions": self.capacity,
            "prompt": len(self.ids),
            "draft": read_config(model_folder(draft.draft_model)) if draft.draft_model else None,
            "longest_draft": longest if draft.gamma is None else draft.gamma,
            "plan": chosen.plan if chosen and not is_auto else None,
        }

    def optional_copies(self) -> int:
        """Most bytes of the low-bit copies that --draft auto makes if they fit, and if the device
        has kernels for them.
        """
        if self.asked.draft.kind != "auto":
            return 0
        plans = plans_for_auto(self.asked.draft, self.folder, self.config.num_layers)
        return sum(low_bit_bytes(self.config, chosen.plan) for chosen in plans.values())

    def memory(self, **changes: Any) -> Memory:
        """Memory for texts in one process, with some other needs."""
        return estimate(self.config, **self.needs() | changes, fast_on=self.device)
