"""Contenders of this project: plain decoding, and the loop with each way to draft."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from decoding.rounds import Round
from decoding.run.chooser import GAMMA, Drafting, DraftOptions, Setting, choose, plain, with_policy
from decoding.run.costs import CostTable
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of timed prompts and contexts
ADAPTIVE = ", adaptive"  # suffix of the name of a draft that stops by Draft & Verify's adaptive exit


class Prompt(NamedTuple):
    """Prompt with its kind (a key of ``search.prompts.PROMPTS``, or "stories") and token ids."""

    kind: str
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Written:
    """Tokens of a text; for texts of this project's loop also the rounds, and the seconds of prefill."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    prefill: float = 0.0


Contender = Callable[[list[int], int], Written]  # writes a text of up to n tokens after a prompt


@dataclass
class Bench:
    """Input of every section: options, target with its setting, prompts, drafts with their costs, libraries."""

    options: argparse.Namespace
    setting: Setting
    prompts: list[Prompt]
    drafts: dict[str, Drafting] = field(default_factory=dict)
    costs: dict[str, CostTable] = field(default_factory=dict)
    libraries: dict[str, Contender] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Lengths in tokens, within the model's context, at which steps and prompts are timed."""
        chosen = LENGTHS[:5:2] if self.options.quick else LENGTHS
        return [length for length in chosen if length <= self.setting.model.max_positions]


def contender(
    writer: Writer, drafting: Drafting, params: SamplingParams, eos_ids: frozenset[int] = frozenset()
) -> Contender:
    """Contender: the loop with one way to draft, prefill included. The seed depends on the prompt only."""

    def write(prompt: list[int], count: int) -> Written:
        prefill = writer.begin(prompt)
        coupling = Coupling("race" if params.temperature else "ratio", sum(prompt))
        sample = writer.write(writer.new_text(Rules(count, eos_ids=eos_ids)), drafting, params, coupling)
        return Written(sample.text.generated, sample.rounds, prefill)

    return write


def our_contenders(
    setting: Setting, drafts: dict[str, Drafting], eos_ids: frozenset[int] = frozenset()
) -> dict[str, Contender]:
    """Contenders: plain decoding, lookup, each model draft with its length and with adaptive exit, --draft auto."""
    ways = {"plain": plain(setting.model), "lookup": choose(DraftOptions("lookup"), setting)}
    for name, drafting in drafts.items():
        adaptive = with_policy(drafting, DraftOptions("exit", adaptive=True), setting.params)
        ways |= {name: drafting, name + ADAPTIVE: adaptive}
    ways["auto"] = choose(DraftOptions("auto"), setting)
    writer = Writer(setting.model, setting.positions)
    return {name: contender(writer, way, setting.params, eos_ids) for name, way in ways.items()}


def model_drafts(setting: Setting, options: argparse.Namespace) -> dict[str, Drafting]:
    """Model drafts: early exits, all layers in low bits, the plan in the model's folder, the draft model, if any."""
    ways = {f"exit {at}": DraftOptions("exit", exit_layer=at, gamma=GAMMA) for at in options.exit_layer}
    if setting.model.fast_bits:
        ways["low bits"] = DraftOptions("lowbit")
    if (setting.folder / "plan.json").exists():
        ways["plan.json"] = DraftOptions("skip")
    if options.draft_model:
        ways["model"] = DraftOptions("model", draft_model=options.draft_model)
    found = {name: choose(way, setting) for name, way in ways.items()}
    return {name: drafting for name, drafting in found.items() if drafting.model}  # a plan may say that no draft pays
