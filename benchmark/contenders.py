"""Contenders of this project: plain decoding, and the loop with each way to draft."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from decoding.rounds import Round
from decoding.run.chooser import GAMMA, Drafting, DraftOptions, Setting, choose, plain, with_policy
from decoding.run.costs import CostTable
from decoding.run.writer import Writer
from decoding.text import Rules
from decoding.verify import Coupling

ADAPTIVE = ", adaptive"  # suffix of the name of a draft that stops by Draft & Verify's adaptive exit


class Prompt(NamedTuple):
    """Kind of a prompt (a key of ``search.prompts.PROMPTS``, or "stories"), and its token ids."""

    kind: str
    ids: list[int]


@dataclass(frozen=True)
class Written:
    """Tokens of a text; for texts of this project's loop also the rounds, and the seconds of prefill."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    prefill: float = 0.0


Contender = Callable[[list[int], int], Written]  # writes a text of n tokens after a prompt; end-of-text is ignored


@dataclass
class Bench:
    """Input of every section. ``lengths`` are those of the prompts of which the first token is timed, in tokens."""

    options: argparse.Namespace
    setting: Setting
    prompts: list[Prompt]
    lengths: list[int]
    drafts: dict[str, Drafting] = field(default_factory=dict)
    costs: dict[str, CostTable] = field(default_factory=dict)
    libraries: dict[str, Contender] = field(default_factory=dict)


def contender(writer: Writer, drafting: Drafting, setting: Setting) -> Contender:
    """Contender: the loop with one way to draft, prefill included. The seed depends on the prompt only."""

    def write(prompt: list[int], count: int) -> Written:
        prefill, text = writer.begin(prompt), writer.new_text(Rules(count))
        sample = writer.write(text, drafting, setting.params, Coupling(setting.coupling, sum(prompt)))
        return Written(text.generated, sample.rounds, prefill)

    return write


def our_contenders(setting: Setting, drafts: dict[str, Drafting]) -> dict[str, Contender]:
    """Contenders: plain decoding, each draft, each draft by a model with adaptive exit too, --draft auto."""
    ways = {"plain": plain(setting.model)}
    for name, drafting in drafts.items():
        ways[name] = drafting
        if drafting.model:
            ways[name + ADAPTIVE] = with_policy(drafting, DraftOptions("exit", adaptive=True), setting.params)
    ways["auto"] = choose(DraftOptions("auto"), setting)
    writer = Writer(setting.model, setting.positions)
    return {name: contender(writer, way, setting) for name, way in ways.items()}


def find_drafts(setting: Setting, options: argparse.Namespace) -> dict[str, Drafting]:
    """Drafts: lookup, early exits, all layers in low bits, the plan in the model's folder, the draft model, if any."""
    layers, ways = setting.model.num_layers, {"lookup": DraftOptions("lookup")}
    for layer in options.exit_layer or sorted({layers // 2, layers * 4 // 5} - {0}):
        ways[f"exit {layer}"] = DraftOptions("exit", exit_layer=layer, gamma=GAMMA)
    if setting.model.fast_bits:
        ways["low bits"] = DraftOptions("lowbit")
    if (setting.folder / "plan.json").exists():
        ways["plan.json"] = DraftOptions("skip")
    if options.draft_model:
        ways["model"] = DraftOptions("model", draft_model=options.draft_model)
    found = {name: choose(way, setting) for name, way in ways.items()}
    return {name: way for name, way in found.items() if way.new_policy().gamma}  # 0: no draft pays
