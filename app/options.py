"""Options of ``generate.py``: one dataclass, whose fields carry types, ranges, help and errors.

The command line, Python's keywords and the server's requests all fill it, and its checks hold for
all of them; requests add limits. Knows nothing of models: what depends on a checkpoint is checked
by ``app.session``.
"""

from __future__ import annotations

import math
import os
import secrets
from argparse import BooleanOptionalAction
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from app.common.parsers import DEVICE, DTYPE, MODEL, TEMPERATURE, parser_of
from app.drafts import DRAFT_OPTIONS, KINDS, LONGEST_ADAPTIVE, OWN, kind_of, kinds_with
from app.plan_file import GAMMA, GAMMA_LOW_BITS, DraftPlan
from decoding.sampling import SamplingParams
from decoding.verify import RULES, Rule
from model.errors import InputError, explaining
from model.plan import LOW_BITS
from weights.load import DTYPES

SHORT_TEXT = 256  # tokens of a text by default
WHOLE_CONTEXT = 1 << 30  # tokens of a request's text by default: the context ends it
# Positions of a cache for texts that are not known yet: on a GPU a step attends over all of them.
CONTEXT = 8192
QUEUE = 64  # most requests that wait, of a server
GRAMMARS = ("json_schema", "regex", "grammar")
WANTED = {  # by the type of an option's values
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    tuple: "a list of strings",
}
ALSO_WANTED = {dict: " or a dict", DraftPlan: " or a DraftPlan"}  # beside a string
EPILOG = """examples:
  python generate.py "Why is the sky blue?" --trace --compare
  python generate.py "Write a short story about a fox." --draft lookup --temperature 0.7 --seed 1
  python generate.py --serve 8000 --model tiny-llama

kinds of draft:
"""


def option(
    default: Any,
    help: str,
    *,
    group: str = "",
    short: str = "",
    metavar: str | None = None,
    choices: tuple[Any, ...] | None = None,
    least: float | None = None,
    most: float = math.inf,
    scope: str = "call",
) -> Any:
    """Return a field of ``Options``, whose annotation gives the types of its values.

    A number lies between ``least``, if given, and ``most``. ``group`` heads the option in --help,
    and ``short`` is its short name. ``help``, ``metavar`` and ``choices`` have argparse's names.
    ``scope`` says where the option may be given beside the command line:

    call       for a text: in a call of Python, or in a request
    model      where a model is loaded
    command    nowhere else
    run        only on the command line of a single run: refused with --serve and --interactive
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "group": group,
            "short": short,
            "metavar": metavar,
            "choices": choices,
            "bounds": (least, most),
            "scope": scope,
        },
    )


@dataclass(frozen=True)
class Options:
    """Options of a run, a call or a request; None stands for one that is not given.

    Raises InputError, whose ``field`` is the option's name, for a value of another type or out of
    range, and for options that do not go together.
    """

    prompt: str | None = option(None, "the prompt", metavar="PROMPT", scope="run")
    prompt_file: str | None = option(
        None, "read the prompt from a file (-: standard input)", metavar="F", scope="run"
    )
    model: str = option(**MODEL, short="-m", scope="model")
    revision: str | None = option(
        None, "branch, tag or commit of a model on the hub", metavar="R", scope="model"
    )
    chat: bool | None = option(None, "use the chat template (default: if there is one)")
    system: str | None = option(None, "system message of the chat", metavar="S")
    chat_template_kwargs: str | dict[str, Any] | None = option(
        None, 'variables of the chat template, as {"enable_thinking": false}', metavar="JSON"
    )
    draft: str = option(
        "auto", f"{', '.join(KINDS)}, or FILE.py:Class: see below", group="drafting", metavar="KIND"
    )
    plan: str | DraftPlan | None = option(
        None,
        f"layer plan of {kinds_with('plan')} (default: plan.json in the model's folder)",
        group="drafting",
        metavar="FILE",
    )
    exit_layer: int | None = option(
        None, "number of layers that exit runs (default: half)", group="drafting", metavar="E"
    )
    bits: int | None = option(
        None,
        f"bits per weight of {kinds_with('bits')}: 4 or 8",
        group="drafting",
        metavar="B",
        choices=LOW_BITS,
    )
    window: int | None = option(
        None,
        f"newest tokens that {kinds_with('window')} sees, with the first few (default: all)",
        group="drafting",
        metavar="N",
        least=1,
    )
    draft_model: str | None = option(
        None, "folder or name of the model that drafts", group="drafting", metavar="DIR"
    )
    gamma: int | None = option(
        None,
        "most tokens drafted per round, in place of a plan's number and threshold (default: chosen"
        f" with auto, the plan's with skip, {GAMMA_LOW_BITS} with lowbit, else {GAMMA}, or"
        f" {LONGEST_ADAPTIVE} with --adaptive)",
        group="drafting",
        metavar="N",
        least=0,
    )
    adaptive: bool | None = option(
        None,
        "end a draft after an unsure token (docs/how_it_works.md#draft-lengths)",
        group="drafting",
    )
    min_target_confidence: float | None = option(
        None,
        "draft nothing after a token of lower probability (docs/how_it_works.md#draft-lengths)",
        group="drafting",
        metavar="X",
        least=0,
        most=1,
    )
    max_new_tokens: int | None = option(
        None,
        f"most tokens to write (default: {SHORT_TEXT}; with --serve, as many as the context holds)",
        group="sampling",
        short="-n",
        metavar="N",
        least=1,
    )
    temperature: float = option(**TEMPERATURE, group="sampling")
    top_k: int = option(
        0, "keep the K likeliest tokens; 0: all", group="sampling", metavar="K", least=0
    )
    top_p: float = option(
        1.0,
        "keep the likeliest tokens that have probability P together; 1: all",
        group="sampling",
        metavar="P",
    )
    min_p: float = option(
        0.0,
        "keep tokens at least P times as likely as the likeliest; 0: all",
        group="sampling",
        metavar="P",
    )
    repetition_penalty: float = option(
        1.0,
        "make tokens of the text so far less likely, above 1; 1: off",
        group="sampling",
        metavar="R",
    )
    frequency_penalty: float = option(
        0.0,
        "subtract F from a token's score for each time that the text has it; 0: off",
        group="sampling",
        metavar="F",
    )
    presence_penalty: float = option(
        0.0,
        "subtract P from the scores of tokens that the text has; 0: off",
        group="sampling",
        metavar="P",
    )
    seed: int | None = option(
        None,
        "seed of sampling (default: random, printed)",
        group="sampling",
        metavar="S",
        least=0,
        most=2**64 - 1,
    )
    coupling: str | None = option(
        None,
        "rule of verification. race (default): the seed determines the text, whatever drafts;"
        " ratio and block: accept more (docs/how_it_works.md#the-race)",
        group="sampling",
        choices=tuple(RULES),
    )
    num_samples: int = option(
        1,
        "number of texts, written at once where possible",
        group="sampling",
        metavar="N",
        least=1,
        most=1 << 16,
        scope="run",
    )
    stop: tuple[str, ...] = option((), "end the text before STR", group="sampling", metavar="STR")
    ban: tuple[str, ...] = option((), "never write WORD", group="sampling", metavar="WORD")
    json_schema: str | dict[str, Any] | None = option(
        None,
        "write JSON of this schema, with its properties in its order",
        group="structured output",
        metavar="FILE_OR_JSON",
    )
    regex: str | None = option(
        None, "write a text that R matches as a whole", group="structured output", metavar="R"
    )
    grammar: str | None = option(
        None, "write a text of this Lark grammar", group="structured output", metavar="FILE"
    )
    device: str | None = option(**DEVICE, default=None, group="machine", scope="model")
    dtype: str = option(**DTYPE, group="machine", choices=(*DTYPES, "auto"), scope="model")
    context: int | None = option(
        None,
        "most tokens of prompt and text together (default: the model's; in conversations at most"
        f" {CONTEXT})",
        group="machine",
        metavar="N",
        least=2,
        scope="model",
    )
    no_compile: bool = option(
        False,
        "run the readable blocks, in plain PyTorch: several times slower",
        group="machine",
        scope="model",
    )
    dry_run: bool = option(
        False,
        "only print the memory that the run would take for one text",
        group="output",
        scope="run",
    )
    compare: bool = option(
        False,
        "also decode plainly; print the speed-up, and whether texts are equal",
        group="output",
        scope="run",
    )
    trace: bool = option(
        False, "show which drafted tokens were accepted, in colour", group="output", scope="command"
    )
    json: bool = option(
        False, "print one JSON object per text on standard output", group="output", scope="run"
    )
    serve: str | None = option(
        None,
        "serve a page, and clients of OpenAI's API, until Ctrl-C",
        group="output",
        metavar="[HOST:]PORT",
        scope="command",
    )
    allow_host: tuple[str, ...] = option(
        (),
        "with --serve, answer requests to this name of the machine too",
        group="output",
        metavar="NAME",
        scope="command",
    )
    queue: int = option(
        QUEUE,
        "with --serve, most requests that wait",
        group="output",
        metavar="N",
        least=0,
        scope="command",
    )
    interactive: bool = option(
        False, "hold a conversation, an answer to each line", group="output", scope="command"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, checked(each, getattr(self, each.name)))
        is_server = self.serve is not None
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", WHOLE_CONTEXT if is_server else SHORT_TEXT)
        self._check_draft()
        if len(self.grammars) > 1:
            raise InputError(f"give one of {', '.join(map(flag_of, GRAMMARS))}")
        of_a_run = [
            name for name in names_of("run") if getattr(self, name) != getattr(Options, name)
        ]
        if is_server and self.interactive:
            raise InputError("give --serve or --interactive, not both")
        if of_a_run and (is_server or self.interactive):
            raise InputError(
                f"{flag_of(of_a_run[0])} has no effect with --serve or --interactive: leave it out"
            )
        if is_server and self.trace:
            raise InputError("--trace has no effect with --serve: a request asks for its own trace")
        if self.interactive and self.chat is False:
            raise InputError("--interactive needs a chat: leave out --no-chat")
        if not is_server and (self.allow_host or self.queue != QUEUE):
            raise InputError("--allow-host and --queue have no effect without --serve")
        _ = self.params  # which checks its numbers

    def _check_draft(self) -> None:
        file, _, class_name = self.draft.rpartition(":")
        if self.draft not in KINDS and not (file and class_name):
            raise InputError(
                f"no draft is called {self.draft!r:.80}: give {', '.join(KINDS)} or FILE.py:Class",
                "draft",
            )
        for name in DRAFT_OPTIONS:
            if name not in kind_of(self.draft).options and getattr(self, name) is not None:
                raise InputError(
                    f"{flag_of(name)} has no effect with --draft {self.draft}: give --draft"
                    f" {kinds_with(name)}",
                    name,
                )
        if self.draft == "model" and self.draft_model is None:
            raise InputError("--draft model needs --draft-model DIR", "draft_model")

    @property
    def grammars(self) -> list[str]:
        """Names of the options that give a grammar: at most one."""
        return [name for name in GRAMMARS if getattr(self, name) is not None]

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the texts."""
        return SamplingParams(
            **{each.name: getattr(self, each.name) for each in fields(SamplingParams)}
        )

    def seeded(self) -> Options:
        """Return these options with a seed, which is drawn where none is given."""
        return replace(self, seed=secrets.randbelow(2**32)) if self.seed is None else self

    @property
    def rule(self) -> Rule:
        """Rule of verification, by default the race. Its seed is 0 where none was given or drawn
        (``seeded``).
        """
        return Rule(self.coupling or "race", self.seed or 0)

    @property
    def draws_alike(self) -> bool:
        """Whether a text is the same with drafts of any length."""
        return self.temperature == 0 or self.rule.name == "race"

    def merged(self, changes: Mapping[str, Any]) -> Options:
        """Return these options with the ``changes`` of a call or a request. These are no options of
        the model.

        Another kind of draft comes without the known options of drafting, and a grammar without
        the known one. Raises InputError.
        """
        known = names_of("call")
        for name in changes.keys() - {*known}:
            raise InputError(
                f"{name} is no option of a call: give {', '.join(sorted(known))}; load takes"
                f" {', '.join(names_of('model'))} too",
                name,
            )
        cleared: dict[str, Any] = {}
        if changes.get("draft", self.draft) != self.draft:
            cleared |= dict.fromkeys(DRAFT_OPTIONS)
        if any(changes.get(name) is not None for name in GRAMMARS):
            cleared |= dict.fromkeys(GRAMMARS)
        return replace(self, **cleared | dict(changes))


def flag_of(name: str) -> str:
    """Return the name of an option on the command line, where the prompt alone has no dashes."""
    return name if name == "prompt" else f"--{name.replace('_', '-')}"


def names_of(scope: str) -> list[str]:
    """Return the names of the options of a scope (see ``option``)."""
    return [each.name for each in fields(Options) if each.metadata["scope"] == scope]


HINTS = get_type_hints(Options)


def types_of(entry: Field) -> tuple[type, ...]:
    """Return the types of an option's values. The first is that of the command line."""
    hint = HINTS[entry.name]
    kinds = get_args(hint) if isinstance(hint, UnionType) else [hint]
    types = tuple(get_origin(kind) or kind for kind in kinds)
    return (*types, int) if float in types else types


def checked(entry: Field, value: Any) -> Any:
    """Return the value of an option. Raises InputError for another type, or a number out of range.

    Python may give a path, a dtype or a device for a string, and a string for a list of one.
    """
    settings = entry.metadata
    types = types_of(entry)
    kind = types[0]
    if value is None and NoneType in types:
        return None
    if isinstance(value, Path | torch.dtype | torch.device):
        value = os.path.expanduser(str(value).removeprefix("torch."))
    if kind is tuple and isinstance(value, str | list):
        value = (value,) if isinstance(value, str) else tuple(value)
    # a truth value is an int too
    has_type = isinstance(value, types) and isinstance(value, bool) == (kind is bool)
    if kind is tuple:
        has_type = has_type and all(isinstance(each, str) for each in value)
    choices = settings["choices"]
    least, most = settings["bounds"]
    wanted = None
    if not has_type:
        wanted = WANTED[kind] + "".join(ALSO_WANTED.get(each, "") for each in types)
    elif choices and value not in choices:
        wanted = f"one of {', '.join(map(str, choices))}"
    elif least is not None and not least <= value <= most:  # NaN lies nowhere
        wanted = f"at least {least}" if most == math.inf else f"from {least} to {most}"
    if wanted:
        raise InputError(f"{flag_of(entry.name)} must be {wanted}, found {value!r:.80}", entry.name)
    with explaining(f"{flag_of(entry.name)} is not UTF-8 text", (UnicodeError,), entry.name):
        texts = value if kind is tuple else [value]
        "".join(each for each in texts if isinstance(each, str)).encode()
    return value


def parse(arguments: list[str] | None = None) -> Options:
    """Return the options of a command line, by default that of the process.

    Ends the process as argparse does; raises InputError as ``Options`` does.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for each in fields(Options):
        names = f"{each.metadata['short']} {flag_of(each.name)}".strip()
        groups.setdefault(each.metadata["group"], {})[names] = argument(each)
    groups[""]["prompt"]["nargs"] = "?"  # it may come from a file or a pipe
    kinds = KINDS | {"FILE.py:Class": OWN}
    parser = parser_of(
        groups,
        prog="generate.py",
        description="Write text with a language model, by self-speculative decoding.",
        epilog=EPILOG + "".join(f"  {name:<15}{kind.help}\n" for name, kind in kinds.items()),
    )
    return Options(**vars(parser.parse_args(arguments)))


def argument(entry: Field) -> dict[str, Any]:
    """Return the arguments of argparse's ``add_argument`` for an option."""
    settings = entry.metadata
    kind = types_of(entry)[0]
    given = {"help": settings["help"], "default": entry.default}
    if kind is bool:
        action = BooleanOptionalAction if entry.default is None else "store_true"
        return given | {"action": action}
    given["metavar"] = settings["metavar"]
    if kind is tuple:
        return given | {"action": "append", "default": []}
    return given | {"type": kind, "choices": settings["choices"]}
