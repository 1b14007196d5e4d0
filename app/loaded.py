"""A loaded model: a checkpoint's config, tokenizer and weights, as the options of the model ask.

It says what memory it takes, under which plans it may draft for itself, and makes their low-bit
copies. Knows nothing of texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from app.characters import Labels
from app.common.command_line import say
from app.common.device import pick_device
from app.options import CONTEXT, Options
from app.plan_file import GAMMA_LOW_BITS, LONGEST_DRAFT, DraftPlan, read_plan
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
BITS = 4  # of a low-bit draft by default
PRIOR_LOW_BITS = 0.85  # acceptance of such a draft before any is observed
ROUNDED = 3.5e8  # bytes of copies made in a second on two cores: 1.2B weights in 2.3 s


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
        self.local_config = self.config  # of the weights in this process
        self.tokenizer = Tokenizer(self.folder)
        self.labels = Labels(self.tokenizer.token_bytes, self.tokenizer.special)
        self.draft_models: dict[Path, Decoder] = {}  # by folder
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

    def capacity(self, ids: Sequence[int] = ()) -> int:
        """Return the positions of a cache: for a prompt and its output or, where texts are not
        known yet, for the context, of at most ``CONTEXT`` unless --context is given.
        """
        wanted = len(ids) + self.options.max_new_tokens if ids else self.options.context or CONTEXT
        return min(wanted, self.context)

    def memory(self, positions: int, prompt: int = 0) -> Memory:
        """Return the memory that texts of up to ``positions`` tokens take.

        The plans of ``auto`` are not counted: they are used only if their low-bit copies fit.
        Raises InputError for a draft model or a plan that cannot be read.
        """
        options = self.options
        chosen = self.plan_for(options)
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
            longest_draft=LONGEST_DRAFT if options.gamma is None else options.gamma,
            plan=chosen.plan if chosen and options.draft != "auto" else None,
        )

    def check_memory(self, ids: Sequence[int] = ()) -> str:
        """Return a line of needed and free memory. Raises InputError with it where that is too
        small.
        """
        plans = self.optional_plans(self.options) if self.options.draft == "auto" else {}
        copies = sum(low_bit_bytes(self.local_config, chosen.plan) for chosen in plans.values())
        positions = self.capacity(ids)
        # Half of a text that is not known yet may be prompt. It is read in chunks.
        prompt = len(ids) or min(positions // 2, PREFILL_CHUNK)
        return check_fits(self.memory(positions, prompt), self.device, optional_copies=copies)

    def plan_for(self, options: Options) -> DraftPlan | None:
        """Return the plan under which the target drafts for itself; None where --draft has none.

        Of exit the first layers, by default half of them; of lowbit all layers, by default in four
        bits; of skip and auto the plan of --plan, else that of the model's folder, if any. Raises
        InputError for a plan that cannot be read.
        """
        layers = self.config.num_layers
        shipped = self.folder / "plan.json"
        given = options.plan
        if given is None and shipped.exists():
            given = shipped
        if options.draft == "exit":
            exit_layer = max(1, layers // 2) if options.exit_layer is None else options.exit_layer
            chosen = DraftPlan(LayerPlan.early_exit(layers, exit_layer))
        elif options.draft == "lowbit":
            chosen = self.low_bit_plan
        elif options.draft not in ("skip", "auto") or given is None:
            return None
        elif isinstance(given, DraftPlan):
            chosen = given
        else:
            chosen = read_plan(Path(given), layers, self.folder)
        plan = chosen.plan.in_bits(options.bits) if options.bits else chosen.plan
        return replace(chosen, plan=replace(plan, window=options.window or plan.window))

    @property
    def low_bit_plan(self) -> DraftPlan:
        """The plan of all layers in four bits."""
        return DraftPlan(
            LayerPlan.full(self.config.num_layers).in_bits(BITS),
            GAMMA_LOW_BITS,
            alpha=PRIOR_LOW_BITS,
        )

    def optional_plans(self, options: Options) -> dict[str, DraftPlan]:
        """Return the plans by name among which --draft auto chooses."""
        plans = {"low bits": self.low_bit_plan}
        chosen = self.plan_for(options)
        if chosen and chosen.gamma != 0 and chosen.plan != self.low_bit_plan.plan:
            plans["plan"] = chosen
        return plans

    def rounding_seconds(self, plan: LayerPlan) -> float:
        """Return about the seconds that the low-bit copies of a plan take on a CPU."""
        return low_bit_bytes(self.config, plan) / ROUNDED

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan, before anything is timed. A line says beforehand how
        long that takes, or that it gains nothing. Raises InputError where they do not fit.
        """
        copies = replace(plan, window=None)  # a window changes none
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
