"""Sections of the benchmark, each of which measures one table.

The first line of a section's docstring is the title of its table.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice, product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from app.files import read_json
from app.prompt import encode_prompt
from app.request import vocabulary
from app.table import Row
from app.together import Scheduler
from app.writer import Drafting, Sample, Task, Writer, plain
from benchmark.contenders import (
    LENGTHS,
    LIBRARIES,
    LONGEST_VERIFICATION,
    Bench,
    Contender,
    Written,
    decode,
)
from benchmark.timing import floor_of, take_turns, timed
from decoding.drafters import ForcedTokens
from decoding.grammar import Grammar
from decoding.policies import FixedLength
from decoding.rounds import Statistics
from decoding.text import Rules, Text
from decoding.verify import Coupling
from search.costs import CostTable

# by the section that they belong to: speed
WARM_UP_TOKENS = 8  # of a text of each contender
# first-token
LONGEST_IF_QUICK = 1024  # of LENGTHS, under --quick
# structured
SCHEMAS = Path(__file__).with_name("schemas.json")
STRUCTURED_TOKENS = 256  # of the longest text
STRUCTURED_TURNS = 5  # texts of each draft and schema
STRUCTURED_POSITIONS = 1024  # with the prompt, which names the schema
# together
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain rounds."""
    verifications: list[Row] = [
        {"step": "verification", "tokens": n, "plain rounds": cost}
        for n, cost in enumerate(bench.costs["lookup"].verify, start=1)
    ]
    return verifications + [
        {
            "step": f"draft step, {name}",
            "plain rounds": costs.draft,
            "more in the first step": costs.first,
        }
        for name, costs in bench.costs.items()
        if name != "lookup"
    ]


def speed_section(bench: Bench) -> list[Row]:
    """Texts, prefill included: medians over all prompts (lowest-highest), and by kind of prompt."""
    setting = bench.setting
    writer = Writer(setting.model, setting.positions)
    ways = {"plain": writer.plain, **bench.drafts}
    ours = {name: partial(decode, writer, setting, way) for name, way in ways.items()}
    texts = time_texts(bench, ours | bench.libraries)
    return [speed_row(bench, name, found, texts["plain"]) for name, found in texts.items()]


def speed_row(bench: Bench, name: str, texts: list[Written], plain: list[Written]) -> Row:
    """Results of a contender on all prompts, beside the plain texts."""
    pairs = list(zip(texts, plain, strict=True))
    speedups = [other.seconds / text.seconds for text, other in pairs]
    by_kind: dict[str, list[float]] = {}
    for (kind, _), speedup in zip(bench.prompts, speedups, strict=True):
        by_kind.setdefault(kind, []).append(speedup)
    rounds = Statistics()
    for round in chain.from_iterable(text.rounds for text in texts):
        rounds.add(round)
    costs = bench.costs_of(name)
    return {
        "decoder": name,
        "tokens/s": spread(bench.max_new_tokens / text.seconds for text in texts),
        "speed-up": spread(speedups),
        "predicted": costs and spread(speedup_by_costs(*pair, costs) for pair in pairs),
        "accepted": rounds.acceptance_rate,
        "a round": rounds.tokens_per_round or None,
        "equal": count_equal((text.tokens, other.tokens) for text, other in pairs),
        "seconds": [text.seconds for text in texts],
        **{kind: statistics.median(found) for kind, found in by_kind.items()},
    }


def time_texts(bench: Bench, contenders: dict[str, Contender]) -> dict[str, list[Written]]:
    """Texts of each contender, one per prompt, timed with their prefill. After a warm-up the
    contenders take turns at each prompt.
    """
    device = bench.setting.model.device
    found: dict[str, list[Written]] = {name: [] for name in contenders}
    for write in contenders.values():
        write(bench.prompts[0][1], WARM_UP_TOKENS)
    for _, prompt in track(
        bench.prompts, "measuring", console=Console(stderr=True), transient=True
    ):
        for name, write in contenders.items():
            work = partial(write, prompt, bench.max_new_tokens)
            text, seconds = timed(work, device)
            found[name].append(replace(text, seconds=seconds))
    return found


def speedup_by_costs(text: Written, plain: Written, costs: CostTable) -> float:
    """Speed-up of a text over the plain one, computed from its rounds and their costs.

    A round that drafts k tokens costs k draft steps and the verification of k + 1 tokens (arXiv
    2211.17192, theorem 3.8), in plain rounds of this text. The measured time of prefill is added.
    """
    step = (plain.seconds - plain.prefill) / len(plain.tokens)
    steps = sum(costs.of_round(len(round.drafted)) for round in text.rounds)
    return plain.seconds / (text.prefill + step * steps)


def together_section(bench: Bench) -> list[Row]:
    """Texts written up to n at a time: tokens per second of all, and the speed-up of drafts.

    Always the same 16 texts, without the time until their first tokens. The draft beside --draft
    auto is the draft model's, or of an early exit that was asked for, or in low bits. "equal"
    counts the texts that equal those written alone.
    """
    setting = bench.setting
    model = setting.model
    exits = [f"exit {layer}" for layer in bench.exit_layers]
    draft = next(
        name for name in ("model", *exits, "low bits", *bench.drafts) if name in bench.drafts
    )
    ways = {"plain": plain(model)}
    ways |= {name: bench.drafts[name] for name in (draft, "auto")}
    prompts = [prompt for _, prompt in islice(cycle(bench.prompts), TOGETHER[-1])]
    alone = partial(decode, Writer(model, setting.positions), setting, ways["plain"])
    texts = [alone(prompt, bench.max_new_tokens).tokens for prompt in prompts]
    rows = []
    for slots in track(TOGETHER, "writing together", console=Console(stderr=True)):
        found = {name: write_together(bench, way, prompts, slots) for name, way in ways.items()}
        plain_speed, _ = found["plain"]
        rows += [
            {
                "texts": slots,
                "decoder": name,
                "tokens/s": speed,
                "equal": count_equal(zip(written, texts, strict=True)),
                "speed-up": speed / plain_speed,
            }
            for name, (speed, written) in found.items()
        ]
    return rows


def write_together(
    bench: Bench, way: Drafting, prompts: list[list[int]], slots: int
) -> tuple[float, list[list[int]]]:
    """Tokens per second of all texts, up to ``slots`` at a time, after their first tokens; and the
    texts.
    """
    setting = bench.setting
    scheduler = Scheduler(setting.model, setting.positions, slots)
    count = bench.max_new_tokens
    seconds = []
    for budget in (1, count):
        tasks = [
            Task(
                Text(prompt, Rules(budget), setting.model),
                way,
                setting.params,
                Coupling(setting.coupling, sum(prompt)),
            )
            for prompt in prompts
        ]
        seconds.append(timed(partial(scheduler.write_all, tasks), setting.model.device)[1])
    reading, whole = seconds
    speed = len(prompts) * (count - 1) / (whole - reading)
    return speed, [task.text.generated for task in tasks]


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token after a prompt of n tokens, and its ratio to plain decoding's."""
    model = bench.setting.model
    longest = min(model.max_positions, LONGEST_IF_QUICK if bench.quick else LENGTHS[-1])
    ours = partial(decode, Writer(model, longest), bench.setting, plain(model))
    contenders = {"plain": ours}
    contenders |= {name: write for name, write in bench.libraries.items() if name in LIBRARIES}
    rows = []
    for tokens in [length for length in LENGTHS if length <= longest]:
        steps = {name: partial(write, [0] * tokens, 1) for name, write in contenders.items()}
        times = take_turns(steps, 1, model.device)
        rows += [
            {"decoder": name, "tokens": tokens, "ms": 1e3 * took, "ratio": took / times["plain"][0]}
            for name, (took,) in times.items()
        ]
    return rows


def floor_section(bench: Bench) -> list[Row]:
    """Floor of a plain round: the time to read every weight once.

    Norms and biases, a thousandth of them, are left out, and an untied embedding, of which one row
    is read. On a GPU the row of the table also has the most memory that torch has held so far.
    """
    model = bench.setting.model
    peak = {}
    if model.device.type == "cuda":
        peak = {"peak MB": torch.cuda.max_memory_allocated(model.device) / 1e6}
    return [floor_of(model) | peak]


def structured_section(bench: Bench) -> list[Row]:
    """Texts under JSON schemas, without prefill: speed-up over plain constrained decoding.

    The drafts are forced tokens alone, low bits where the device has kernels for them, and --draft
    auto. A text under each schema is written plainly and by each draft in turns. "speed-up" is the
    median of the turns, and the last rows its geometric means. "equal" counts the texts that equal
    the plain one.
    """
    setting = bench.setting
    model = setting.model
    tokens = vocabulary(setting.tokenizer, model.vocab_size)
    writer = Writer(model, STRUCTURED_POSITIONS, setting.tokenizer.token_bytes)
    forced = Drafting(
        "forced tokens",
        lambda cache: ForcedTokens(model.vocab_size, model.device),
        lambda: FixedLength(LONGEST_VERIFICATION - 1),
    )
    others = {name: bench.drafts[name] for name in ("low bits", "auto") if name in bench.drafts}
    drafts = {"forced": forced, **others}
    ways = {"plain": writer.plain, **drafts}
    turns = 2 if bench.quick else 1 + STRUCTURED_TURNS
    rows: list[Row] = []
    for name, each in track(read_json(SCHEMAS).items(), "schemas", console=Console(stderr=True)):
        schema = json.dumps(each["schema"])
        grammar = Grammar("json_schema", schema, tokens)
        rules = Rules(STRUCTURED_TOKENS, setting.tokenizer.eos_ids, grammar=grammar)
        writer.begin(encode_prompt(setting.tokenizer, each["request"], schema=schema))
        found: dict[str, list[Sample]] = {way: [] for way in ways}
        for seed, (way, drafting) in product(range(turns), ways.items()):
            coupling = Coupling(setting.coupling, seed)
            text = writer.write(writer.new_text(rules), drafting, setting.params, coupling)
            found[way].append(text)
        rows += [
            {"schema": name, "decoder": way, **structured_row(found[way], found["plain"])}
            for way in drafts
        ]
    for way in drafts:
        medians = [row["speed-up"]["median"] for row in rows if row["decoder"] == way]
        mean = statistics.geometric_mean(medians)
        rows.append({"schema": "geometric mean", "decoder": way, "speed-up": mean})
    return rows


def structured_row(texts: list[Sample], plain: list[Sample]) -> Row:
    """Results of a draft on one schema, beside the plain texts; the first turn warms up."""
    pairs = [*zip(texts, plain, strict=True)]
    last = texts[-1].statistics
    return {
        "tokens": last.tokens,
        "a round": last.tokens_per_round,
        "speed-up": spread(text.speed / plain.speed for text, plain in pairs[1:]),
        "equal": count_equal((text.tokens, plain.tokens) for text, plain in pairs),
    }


def spread(values: Iterable[float]) -> Row:
    """Median and range of some values."""
    values = list(map(float, values))
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def count_equal(pairs: Iterable[tuple[list[int], list[int]]]) -> str:
    """Number of texts that equal those they are paired with, of all."""
    found = [text == other for text, other in pairs]
    return f"{sum(found)}/{len(found)}"


SECTIONS = {  # in the order in which they are measured
    "costs": costs_section,
    "speed": speed_section,
    "first-token": first_token_section,
    "floor": floor_section,
    "structured": structured_section,
    "together": together_section,
}
