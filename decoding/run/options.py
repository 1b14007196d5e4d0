"""Options in their types: those of a text (``TextOptions``), and the request of a command line
(``Request``), which is checked before any weight is read.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from cli.device import pick_device
from cli.files import check_place, explaining, read_text
from decoding.break_even import BreakEven
from decoding.grammar import Grammar, Vocabulary
from decoding.run.arguments import DRAFTING, GRAMMARS
from decoding.run.chooser import DraftOptions, plan_for, plans_for_auto
from decoding.run.prompt import check_prompt, checked_prompt, encode_prompt, read_prompt
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model import InputError
from model.fast import gpu_bits, why_not_compiled
from model.plan import LOW_BITS
from weights.load import model_folder, pick_dtype, read_config, shown_name
from weights.memory import LONGEST_DRAFT, Memory, estimate, low_bit_bytes
from weights.tokenizer import Tokenizer

# Positions of a cache for texts that are not known yet: on a GPU a step attends over all of them.
CONTEXT = 8192


class TextOptions(NamedTuple):
    """Options of drafting and sampling, the rules of the text, and its seed."""

    draft: DraftOptions
    params: SamplingParams
    rules: Rules
    coupling: Coupling

    @staticmethod
    def of(
        options: Namespace,
        eos_ids: frozenset[int] = frozenset(),
        grammar: Grammar | None = None,
    ) -> TextOptions:
        """The options of a text among those of a command line or a call. Raises InputError for a
        value out of range.
        """
        draft = {name: getattr(options, name) for name in DRAFTING}
        params = {field.name: getattr(options, field.name) for field in fields(SamplingParams)}
        return TextOptions(
            DraftOptions(options.draft, **draft),
            SamplingParams(**params),
            Rules(options.max_new_tokens, eos_ids, options.stop, options.ban, grammar=grammar),
            Coupling.of(options.coupling, options.seed),
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
        schema = read_text(schema)
    grammar = options.grammar and read_text(options.grammar)
    return Namespace(**{**vars(options), "json_schema": schema, "grammar": grammar})


def told_schema(options: Namespace) -> str | None:
    """The JSON schema that the model is told, of options whose files are read."""
    return options.json_schema if options.schema_prompt else None


def prompt_ids(tokenizer: Tokenizer, prompt: str, options: Namespace) -> list[int]:
    """Token ids of a prompt, by options whose files are read."""
    return encode_prompt(
        tokenizer,
        prompt,
        chat=options.chat,
        system=options.system,
        schema=told_schema(options),
    )


@lru_cache(maxsize=1)
def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Tokens of a model of this vocabulary size, as grammars read them."""
    tokens = [tokenizer.token_bytes(token) for token in range(size)]
    return Vocabulary(tokens, tokenizer.eos_ids, tokenizer.encode_continuation)


def check_options(options: Namespace) -> None:
    """Raises InputError for options of a command line that do not go together, for numbers out of
    range, and for files that cannot be written.
    """
    with explaining("the text of --system, --stop or --ban is not UTF-8", (UnicodeEncodeError,)):
        "".join((options.system or "", *options.stop, *options.ban)).encode()
    if options.context is not None and options.context < 1:
        raise InputError(f"--context must be at least 1, found {options.context}")
    for place in filter(None, (options.html, options.svg)):
        check_place(place)
    of_one_prompt = ("prompt", "prompt_file", "compare", "html", "svg", "json")
    if (options.serve or options.interactive) and any(map(vars(options).get, of_one_prompt)):
        raise InputError(
            "--serve and --interactive take no prompt, --compare, --html, --svg or --json"
        )
    if options.serve and options.interactive:
        raise InputError("give --serve or --interactive: one process does one of them")
    if options.svg and options.num_samples > 1:
        raise InputError("--svg shows one text: leave out --num-samples")


class Request:
    """The request of ``generate.py``'s command line, checked before any weight is read.

    ``prompt`` and its token ``ids`` are empty where there is no prompt, as with --serve. ``name``
    is the model's, as it is shown; ``repeat_with`` has the options that repeat a sampled text, and
    is empty for a greedy one. Raises InputError.
    """

    def __init__(self, options: Namespace) -> None:
        check_options(options)
        self.options = options
        self.draft, self.params, self.rules, self.coupling = TextOptions.of(options)
        number = f" --num-samples {options.num_samples}" if options.num_samples > 1 else ""
        self.repeat_with = f"{self.coupling}{number}" if options.temperature else ""
        self.folder = model_folder(options.model, options.revision)
        self.name = shown_name(self.folder)
        self.device = pick_device(options.device)
        self.config = read_config(self.folder)
        self.dtype = pick_dtype(options.dtype, self.folder, self.device)
        self.prompt = ""
        self.ids: list[int] = []
        has_prompt = options.prompt is not None or options.prompt_file is not None
        if has_prompt or not (options.serve or options.interactive or options.dry_run):
            self._read_prompt()

    def _read_prompt(self) -> None:
        """Read the prompt and the grammar, and limit the text to the room that the prompt leaves
        in the context.
        """
        self.prompt = read_prompt(self.options.prompt, self.options.prompt_file)
        read = read_grammar_files(self.options)
        rules = self.text_options(read).rules
        self.ids = self.encode(self.prompt, read)
        budget = min(rules.max_new_tokens, self.context - len(self.ids))
        self.rules = replace(rules, max_new_tokens=budget)

    def text_options(self, options: Namespace, seconds: float = math.inf) -> TextOptions:
        """The options of a text of this model, with its end-of-text tokens and its grammar, among
        those of a call whose files are read.

        ``seconds``: the longest that all masks of a grammar may take. Raises InputError for a value
        out of range, for several grammars, and for a wrong one.
        """
        given = [name for name in GRAMMARS if getattr(options, name) is not None]
        if len(given) > 1:
            raise InputError("give one of --json-schema, --regex and --grammar")
        grammar = None
        if given:
            source = getattr(options, given[0])
            tokens = vocabulary(self.tokenizer, self.config.vocab_size)
            grammar = Grammar(GRAMMARS[given[0]], source, tokens, seconds)
        return TextOptions.of(options, self.tokenizer.eos_ids, grammar)

    def encode(self, prompt: str, options: Namespace) -> list[int]:
        """Token ids of a prompt, by options whose files are read. Raises InputError for anything
        but text, and for a prompt that is too long for the context.
        """
        ids = prompt_ids(self.tokenizer, checked_prompt(prompt), options)
        check_prompt(ids, self.config, self.folder, self.most_positions)
        return ids

    @property
    def most_positions(self) -> int:
        """Most positions of any text: --context, at most the model's."""
        return min(self.options.context or math.inf, self.config.max_positions)

    @property
    def context(self) -> int:
        """Most positions of the request's text: all, after a prompt or with --context; else, of
        texts that are not known yet, at most ``CONTEXT``.
        """
        if self.prompt or self.options.context:
            return self.most_positions
        return min(CONTEXT, self.most_positions)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer(self.folder)

    @property
    def capacity(self) -> int:
        """Positions of prompt and output; without a prompt the context, for conversations."""
        return len(self.ids) + self.rules.max_new_tokens if self.prompt else self.context

    def needs(self) -> dict[str, Any]:
        """Arguments of ``weights.memory.estimate`` besides the config and the device.

        The plans of ``auto`` are not counted: they are used only if their low-bit copies fit.
        Raises InputError for a draft model or a plan that cannot be read.
        """
        draft = self.draft
        kernels = gpu_bits(self.device, self.dtype)
        chosen = plan_for(draft, self.folder, self.config.num_layers, kernels)
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
        """Most bytes of the low-bit copies that --draft auto makes if they fit."""
        if self.draft.kind != "auto":
            return 0
        kernels = gpu_bits(self.device, self.dtype)
        is_compiled = self.dtype != torch.float64 and not self.options.no_compile
        if self.device.type == "cpu" and is_compiled and not why_not_compiled():
            kernels = LOW_BITS
        plans = plans_for_auto(self.draft, self.folder, self.config.num_layers, kernels)
        return sum(low_bit_bytes(self.config, chosen.plan) for chosen in plans.values())

    def memory(self, **changes: Any) -> Memory:
        """Memory for texts in one process, with some other needs."""
        return estimate(self.config, **self.needs() | changes, fast_on=self.device)
