"""Request of a command line, checked before any weight is read: the options of its texts in their
types (``TextOptions``), and its model, prompt and memory (``Request``).
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

from app.device import pick_device
from app.draft_options import DraftOptions, plan_for, plans_for_auto
from app.files import check_place, explaining, read_text
from app.options import DRAFTING, GRAMMARS, TOGETHER, check_option
from app.plan_file import LONGEST_DRAFT
from app.prompt import check_prompt, checked_prompt, encode_prompt, read_prompt
from decoding.break_even import BreakEven
from decoding.grammar import Grammar, Vocabulary
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model import InputError
from weights.load import model_folder, pick_dtype, read_config, shown_name
from weights.memory import Memory, estimate, low_bit_bytes
from weights.tokenizer import Tokenizer

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
    is_alone = sum(map(bool, (has_prompt, options.interactive, options.serve))) <= 1
    if not is_alone or (options.serve and options.trace):
        raise InputError(
            "--serve and --interactive stand alone: they take no prompt, --num-samples, --compare,"
            " --html, --svg or --json, and --serve no --trace"
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
            "draft_config": draft.draft_model and read_config(model_folder(draft.draft_model)),
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
