"""Ways to write a text: this project's session with each kind of draft, and other libraries.

``compare`` lets them write the same prompts in turns, and counts the texts that equal plain
decoding's. Knows nothing of screens and files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

import torch

from app.options import Options
from app.session import Sample, Session, Slot
from app.table import Row
from benchmark.timing import ratios, spread, take_turns
from decoding.rounds import Round, Statistics
from decoding.text import Rules, Text

ADAPTIVE = ", adaptive"  # ends the names of drafts with the adaptive exit


@dataclass(frozen=True)
class Case:
    """Prompt of a kind that the ways write ``count`` tokens after; ``number`` is that of the text's
    random numbers.

    A text under a JSON ``schema`` ends by itself. Others ignore end-of-text tokens.
    """

    kind: str
    ids: Sequence[int]
    count: int
    number: int = 0
    schema: str | None = None


@dataclass(frozen=True)
class Written:
    """Tokens of a text, and for this project's texts their rounds. ``seconds`` are those of decoding
    alone, where the reading of the prompt is not to be counted.
    """

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    seconds: float | None = None


Way = Callable[[Case], Written]


def find_drafts(
    session: Session, exit_layers: Sequence[int] = (), draft_model: str | None = None
) -> dict[str, Options]:
    """Return the options of each draft: lookup, early exits, by default a middle and a late one,
    low bits where they are fast, the plan in the model's folder and the draft model, if any, and
    auto. Those by a model also have the adaptive exit.
    """
    layers = session.config.num_layers
    exits = exit_layers or sorted({layers // 2, layers * 4 // 5} - {0})
    by_model = {f"exit {layer}": {"draft": "exit", "exit_layer": layer} for layer in exits}
    if session.model.abilities.low_bits:
        by_model["low bits"] = {"draft": "lowbit"}
    if (session.folder / "plan.json").exists():
        by_model["plan.json"] = {"draft": "skip"}
    if draft_model:
        by_model["model"] = {"draft": "model", "draft_model": draft_model}
    drafts = {"lookup": {"draft": "lookup"}}
    for name, given in by_model.items():
        drafts |= {name: given, name + ADAPTIVE: given | {"adaptive": True}}
    drafts["auto"] = {"draft": "auto"}
    return {name: session.options.merged(given) for name, given in drafts.items()}


def begin(session: Session, options: Options, case: Case) -> Sample:
    """Return a text that holds the prompt of its case only."""
    given = {"max_new_tokens": case.count, "json_schema": case.schema}
    sample = session.begin(case.ids, options.merged(given), case.number)
    if case.schema is None:
        sample.source = Text(case.ids, Rules(case.count), session.model)
    return sample


def way_of(session: Session, slot: Slot, options: Options) -> Way:
    """Return the way to write with these options, on a cache that all ways share.

    Each text without a schema reads its prompt anew.
    """

    def write(case: Case) -> Written:
        sample = begin(session, options, case)
        if case.schema is None:
            slot.prompt = []
        for _ in session.rounds(sample, slot):
            pass
        return Written(sample.tokens, sample.rounds, sample.seconds if case.schema else None)

    return write


def compare(
    ways: Mapping[str, Way], cases: Sequence[Case], device: torch.device
) -> list[Row]:
    """Return a row for each way, with its speed-up over the way "plain" on the same prompts, in all
    and by kind. "equal" counts the texts that are the same.
    """
    runs = take_turns(ways, cases, device)
    texts = {name: [run.result for run in each] for name, each in runs.items()}
    seconds = {name: [run.result.seconds or run.seconds for run in runs[name]] for name in ways}
    rows = []
    for name, own in texts.items():
        speedups = ratios(seconds["plain"], seconds[name])
        by_kind: dict[str, list[float]] = {}
        for case, speedup in zip(cases, speedups, strict=True):
            by_kind.setdefault(case.kind, []).append(speedup)
        told = Statistics()
        for round in chain.from_iterable(text.rounds for text in own):
            told.add(round)
        tokens = [len(text.tokens) for text in own]
        rows.append(
            {
                "decoder": name,
                "tokens/s": spread(ratios(tokens, seconds[name])),
                "speed-up": spread(speedups),
                "accepted": told.acceptance_rate,
                "a round": told.tokens_per_round or None,
                "equal": count_equal(own, texts["plain"]),
                **{kind: median(found) for kind, found in by_kind.items()},
                "kinds": [*by_kind],
                "seconds": seconds[name],
                "tokens": tokens,
                "rounds": [len(text.rounds) for text in own],
            }
        )
    return rows


def count_equal(texts: Sequence[Written], others: Sequence[Written]) -> str:
    """Return how many texts equal those at the same place, of all."""
    equal = sum(text.tokens == other.tokens for text, other in zip(texts, others, strict=True))
    return f"{equal}/{len(texts)}"
