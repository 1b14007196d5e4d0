"""Contenders: ways to write a greedy text of a given length, end-of-text ignored. These are ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from decoding.rounds import Round
from decoding.run.chooser import GAMMA, Drafting, DraftOptions, Setting, choose, plain, policy_maker
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import chance_of
from model import Decoder, InputError
from weights.cli.files import is_there

WARM_UP_TOKENS = 8
PROMPT_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)

Prompt = tuple[str, str, list[int]]  # kind, text, token ids


@dataclass(frozen=True)
class Written:
    """A text's tokens, and, where the contender is ours, its rounds and the seconds that reading the prompt took."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    prefill: float = 0.0


@dataclass(frozen=True)
class Contender:
    """``write(prompt, count)`` writes so many tokens; ``costs`` names the cost table that predicts its speed."""

    write: Callable[[list[int], int], Written]
    costs: str | None = None


@dataclass
class Bench:
    """Everything a section needs: the options, the target in its setting, prompts, drafts, libraries; and notes."""

    options: argparse.Namespace
    setting: Setting
    prompts: list[Prompt]
    drafts: dict[str, Drafting] = field(default_factory=dict)
    others: dict[str, Contender] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Decoder:
        return self.setting.model

    @property
    def folder(self) -> Path:
        return self.setting.folder

    @property
    def step_repeats(self) -> int:
        """How often single steps are timed; they are short."""
        return 5 if self.options.quick else 15

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of the prompts that are read to their first token, as far as the context reaches."""
        return [length for length in self.some(PROMPT_LENGTHS) if length <= self.model.max_positions]

    def some(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """All of the lengths, or three of the shorter ones in a quick run."""
        return lengths[:5:2] if self.options.quick else lengths


def our_contender(
    writer: Writer,
    drafting: Drafting,
    costs: str | None = None,
    params: SamplingParams = SamplingParams(),
    eos_ids: frozenset[int] = frozenset(),
) -> Contender:
    """Our loop, the prompt's prefill included. Sampled texts are those of one seed, whatever drafts."""

    def write(prompt: list[int], count: int) -> Written:
        prefill, coupling = writer.begin(prompt), "race" if params.temperature else "ratio"
        chance = chance_of(coupling, sum(prompt), writer.model.device)
        sample = writer.write(writer.new_text(Rules(count, eos_ids=eos_ids)), drafting, params, chance)
        return Written(sample.text.generated, sample.rounds, prefill)

    return Contender(write, costs)


def our_contenders(
    setting: Setting, drafts: dict[str, Drafting], eos_ids: frozenset[int] = frozenset()
) -> dict[str, Contender]:
    """Plain decoding, lookup, each model draft as it is and with adaptive exit, and what --draft auto chooses."""
    writer = Writer(setting.model, setting.positions)

    def contender(drafting: Drafting, costs: str | None = None) -> Contender:
        return our_contender(writer, drafting, costs, setting.params, eos_ids)

    found = {
        "plain": contender(plain(setting.model)),
        "lookup": contender(choose(DraftOptions("lookup"), setting), "lookup"),
    }
    for name, drafting in drafts.items():
        found[name] = contender(drafting, name)
        adaptive = policy_maker(DraftOptions("exit", adaptive=True), setting.params, drafting)
        found[f"{name}, adaptive"] = contender(replace(drafting, new_policy=adaptive), name)
    auto = choose(DraftOptions("auto"), setting)
    return found | {"auto": contender(auto, None if auto.plan else "lookup")}  # where it has several costs: none


def find_drafts(setting: Setting, options: argparse.Namespace) -> dict[str, Drafting]:
    """By name: early exits, all layers in low bits, the folder's own plan and the draft model, if there are any.

    Without --exit-layer two or three layers are tried, the middle and later. Raises InputError for one out of range.
    """
    layers = setting.model.num_layers
    for at in options.exit_layer:
        if not 1 <= at < layers:
            raise InputError(f"exit layer {at} must be from 1 to {layers - 1}")
    middle, late = layers // 2, exit_layer(layers)
    tried = options.exit_layer or ([middle, late] if options.quick else [middle, layers * 2 // 3, late])
    drafts = {f"exit {at}": choose(DraftOptions("exit", exit_layer=at, gamma=GAMMA), setting) for at in tried if at}
    if setting.model.fast_bits:
        drafts["low bits"] = choose(DraftOptions("lowbit"), setting)
    if is_there(setting.folder / "plan.json"):
        own = choose(DraftOptions("skip"), setting)
        drafts |= {"plan.json": own} if own.plan else {}  # a plan may say that the model should not draft for itself
    if options.draft_model:
        drafts["model"] = choose(DraftOptions("model", draft_model=options.draft_model), setting)
    return drafts


def exit_layer(layers: int, exits: Sequence[int] = ()) -> int:
    """The exit of which transformers is measured too: the deepest."""
    return max(exits, default=max(1, layers * 4 // 5))
