"""A loaded model: a checkpoint's config, tokenizer and weights, as the options of the model ask.

It says what memory it takes, under which plans it may draft for itself, and makes their low-bit
copies. Writes no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from app.characters import Labels
from app.common.command_line import say
from app.common.device import pick_device
from app.drafts import kind_of, low_bit_plan
from app.options import CONTEXT, Options
from app.plan_file import LONGEST_DRAFT, DraftPlan, copies_of, read_plan
from model.decoder import PREFILL_CHUNK, Decoder
from model.errors import InputError
from model.plan import LayerPlan
from weights.importance import set_importance
from weights.load import (
    config_of_weights,
    load_model,
    model_folder,
    pick_dtype,
    shown_name,
)
from weights.memory import Memory, check_fits, estimate, has_memory_for, low_bit_bytes
from weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.offers import Offers
    from decoding.grammar import Vocabulary

NOTICED = 0.5  # seconds: copies that take less are made without a line
# In bytes per second. Both were measured on one machine, of two cores; change them together, since
# ``copies_pay`` compares them.
ROUNDING_RATE = 3.5e8  # of low-bit copies that are made: 1.2B weights in 2.3 s
READ_RATE = 38e9  # of weights that a plain round reads


class LoadedModel:
    """Model with its tokenizer. The weights are loaded when they are first used.

    Raises InputError.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = model_folder(options.model, options.revision)
        self.name = shown_name(self.folder)
        self.device = pick_device(options.device)
        self.dtype = pick_dtype(options.dtype, self.folder, self.device)
        self.config = config_of_weights(self.folder, self.dtype)
        self.local_config = self.config  # of this process's weights: of several, each has a part
        self.tokenizer = Tokenizer(self.folder)
        self.labels = Labels(self.tokenizer.token_bytes, self.tokenizer.special)
        self.read_plan = partial(read_plan, num_layers=self.config.num_layers, folder=self.folder)
        # What drafts have made and learnt, from ``app.drafts`` and ``app.offers``: it lasts as long
        # as the model.
        self.draft_models: dict[Path, Decoder] = {}  # by folder
        self.user_files: dict[str, dict[str, Any]] = {}  # names of --draft FILE.py:Class
        self.prepared: set[LayerPlan] = set()  # plans whose copies are made, without windows
        self.offers: Offers | None = None  # of --draft auto

    @cached_property
    def model(self) -> Decoder:
        """The model, loaded and prepared."""
        return self.load(self.folder)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens, as grammars read them."""
        from decoding.grammar import Vocabulary

        tokens = [self.tokenizer.token_bytes(token) for token in range(self.config.vocab_size)]
        return Vocabulary(tokens, self.tokenizer.eos_ids, self.tokenizer.encode_continuation)

    @property
    def context(self) -> int:
        """Most positions of any text: --context, at most the model's."""
        return min(self.options.context or math.inf, self.config.max_positions)

    def capacity(self) -> int:
        """Return the positions of a cache for texts that are not known yet: the context, but at
        most ``CONTEXT`` unless --context is given.
        """
        return min(self.options.context or CONTEXT, self.context)

    def memory(self, positions: int, prompt: int = 0) -> Memory:
        """Return the memory of the weights, and of one text of up to ``positions`` tokens of which
        ``prompt`` are read first.

        A draft model is counted, and so are low-bit copies, but not those of ``optional_plans``.
        Raises InputError for a draft model or a plan that cannot be read.
        """
        options = self.options
        chosen = self.plan_for(options)
        longest = max(LONGEST_DRAFT, chosen.gamma or 0) if chosen else LONGEST_DRAFT
        of_draft = options.draft_model and config_of_weights(
            model_folder(options.draft_model), self.dtype
        )
        return estimate(
            self.local_config,
            dtype=self.dtype,
            positions=positions,
            device=self.device,
            prompt=prompt,
            draft_config=of_draft,
            longest_draft=longest if options.gamma is None else options.gamma,
            plan=chosen.plan if chosen and not self.optional_plans(options) else None,
        )

    def check_memory(self, ids: Sequence[int] = ()) -> str:
        """Return a line of needed and free memory, for the text after a prompt. Without ``ids`` the
        text is not known yet.

        Called before the weights are loaded. Raises InputError with the line where memory is too
        small.
        """
        copies = sum(
            low_bit_bytes(self.local_config, chosen.plan)
            for chosen in self.optional_plans(self.options).values()
        )
        output = self.options.max_new_tokens
        positions = min(len(ids) + output, self.context) if ids else self.capacity()
        # Half of a text that is not known yet may be prompt. It is read in chunks.
        prompt = len(ids) or min(positions // 2, PREFILL_CHUNK)
        return check_fits(self.memory(positions, prompt), self.device, optional_copies=copies)

    def check_draft_memory(self, folder: Path, positions: int) -> None:
        """Raise InputError where a draft model, with a cache of its own, does not fit beside the
        loaded target. They share the workspace.
        """
        config = config_of_weights(folder, self.dtype)
        memory = estimate(config, self.dtype, positions, self.device, prompt=1, longest_draft=0)
        check_fits(replace(memory, workspace=0, buffers=0), self.device)

    def plan_for(self, options: Options) -> DraftPlan | None:
        """Return the plan under which the target drafts for itself, with the bits and the window of
        the options; None where --draft has none. Raises InputError for a plan that cannot be used.
        """
        chosen = kind_of(options.draft).plan(self, options)
        if chosen is None:
            return None
        plan = chosen.plan.in_bits(options.bits) if options.bits else chosen.plan
        return replace(chosen, plan=replace(plan, window=options.window or plan.window))

    def optional_plans(self, options: Options) -> dict[str, DraftPlan]:
        """Return the plans by name among which --draft auto chooses, none for another draft.

        Their low-bit copies are made only if they fit into memory: auto drafts without them too.
        Another draft needs the copies of its plan.
        """
        if options.draft != "auto":
            return {}
        low_bits = low_bit_plan(self, options)
        plans = {"low bits": low_bits}
        chosen = self.plan_for(options)
        if chosen and chosen.gamma != 0 and chosen.plan != low_bits.plan:
            plans["plan"] = chosen
        return plans

    def rounding_seconds(self, plan: LayerPlan) -> float:
        """Return about the seconds that the low-bit copies of a plan take on a CPU."""
        return low_bit_bytes(self.config, plan) / ROUNDING_RATE

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan, before anything is timed. A line says beforehand how
        long that takes, or that it gains nothing. Raises InputError where they do not fit.
        """
        copies = copies_of(plan)
        if copies in self.prepared:
            return
        if copies.has_low_bits and not self.model.abilities.low_bits:
            say(
                "drafts in low bits are no faster here: there are no kernels for"
                f" {self.model.dtype} on {self.device.type}"
            )
        elif copies.has_low_bits:
            if not has_memory_for(self.model, [copies]):
                raise InputError(
                    "the low-bit copies of this draft do not fit into memory: give --draft none or"
                    " lookup"
                )
            seconds = self.rounding_seconds(copies)
            if self.device.type == "cpu" and seconds > NOTICED:
                say(f"rounding weights for drafts takes about {seconds:.1f} s")
            set_importance(self.model, self.tokenizer, self.folder)
        self.model.prepare(copies)
        self.prepared.add(copies)

    def load(self, folder: Path) -> Decoder:
        """Return a model with fast steps, as the options ask for."""
        return accelerated(load_model(folder, self.dtype, self.device), self.options)


def accelerated(model: Decoder, options: Options) -> Decoder:
    """Return the model with fast steps, where ``model.fast`` is there and has any."""
    if options.no_compile:
        if model.device.type == "cuda":
            torch.compiler.set_stance("force_eager")  # of sampling too
        return model
    try:
        from model.fast import accelerate
    except ModuleNotFoundError as error:
        say(f"steps are the readable blocks', several times slower: {error}")
        return model
    return accelerate(model)
