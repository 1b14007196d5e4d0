"""Sections of the benchmark, each of which measures one table.

The first line of a section's docstring is the title of its table.
"""

import statistics
from collections.abc import Iterable
from dataclasses import astuple
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmark.contenders import ADAPTIVE, Bench, Contender, Written, contender, our_contenders
from benchmark.libraries import LIBRARIES, WARM_UP_TOKENS
from decoding.rounds import Statistics
from decoding.run.chooser import bits_table, plain
from decoding.run.costs import CONTEXT, CostTable, filled_cache, measure_costs
from decoding.run.together import Call, Conductor, Task, answers
from decoding.run.writer import Writer
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model.clock import now, take_turns
from weights.cli.table import Row
from weights.memory import parameter_count

LONGEST_VERIFICATION = 16  # tokens
STEP_REPEATS = 7
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time
BANDWIDTH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # enough that the time to read them can be measured


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain steps."""
    longest = max([LONGEST_VERIFICATION - 1, *(draft.new_policy().gamma for draft in bench.drafts.values())])
    measure = partial(measure_costs, bench.setting.model, params=bench.setting.params, coupling=bench.setting.coupling)
    verify = measure(None, None, longest=longest).verify
    bench.costs = {name: measure(way.model, way.plan, verify=verify) for name, way in bench.drafts.items()}
    rows = [{"step": "verification", "tokens": n, "plain steps": cost} for n, cost in enumerate(verify, start=1)]
    costs = {name: table.draft for name, table in bench.costs.items() if bench.drafts[name].model}
    return rows + [{"step": f"draft step, {name}", "plain steps": cost} for name, cost in costs.items()]


def bits_section(bench: Bench) -> list[Row]:
    """Drafts of all layers in few bits: cost of a step, share of drafts kept, best length, predicted speed-up.

    Measured as the first ``--draft lowbit`` does it.
    """
    columns, names = astuple(bits_table(bench.setting))[:-1], ("bits", "plain steps", "kept", "gamma", "speed-up")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


class Texts(NamedTuple):
    """Texts of a contender by prompt, and the median seconds of a run, prefill included."""

    written: list[Written]
    seconds: np.ndarray


def time_texts(bench: Bench, contenders: dict[str, Contender]) -> dict[str, Texts]:
    """Texts of each contender. After a warm-up each, contenders take turns on each prompt."""
    prompts, device = [prompt.ids for prompt in bench.prompts], bench.setting.model.device
    shape = bench.options.repeats, len(prompts)
    written = {name: [Written([])] * len(prompts) for name in contenders}
    seconds = {name: np.zeros(shape) for name in contenders}
    for write in contenders.values():
        write(prompts[0], WARM_UP_TOKENS)
    for turn in track([*np.ndindex(shape)], "measuring", console=Console(stderr=True), transient=True):
        prompt = turn[1]
        for name, write in contenders.items():
            began = now(device)
            written[name][prompt] = write(prompts[prompt], bench.options.max_new_tokens)
            seconds[name][turn] = now(device) - began
    return {name: Texts(written[name], np.median(seconds[name], axis=0)) for name in contenders}


def predicted_speedups(texts: Texts, plain: Texts, costs: CostTable) -> list[float]:
    """Speed-up on each prompt, computed from measured costs and the rounds of its text.

    A round with a draft of k tokens costs k draft steps and the verification of k + 1 tokens (as in arXiv 2211.17192,
    theorem 3.8), in plain steps of this text. The measured time of prefill is added.
    """
    predicted = []
    for text, other, total in zip(texts.written, *plain, strict=True):
        step = (total - other.prefill) / len(other.tokens)
        lengths = [len(round.drafted) for round in text.rounds]
        steps = sum(length * costs.draft + costs.verify[length] for length in lengths)
        predicted.append(total / (text.prefill + step * steps))
    return predicted


def speed_section(bench: Bench) -> list[Row]:
    """Texts, prefill included: medians over the prompts (lowest-highest), medians by kind of prompt."""
    texts = time_texts(bench, our_contenders(bench.setting, bench.drafts) | bench.libraries)
    rows, plain, kinds = [], texts["plain"], np.array([prompt.kind for prompt in bench.prompts])
    for name, found in texts.items():
        sums, costs = Statistics(), bench.costs.get(name.removesuffix(ADAPTIVE))
        for round in (round for text in found.written for round in text.rounds):
            sums.add(round)
        speedups = plain.seconds / found.seconds
        equal = sum(text.tokens == other.tokens for text, other in zip(found.written, plain.written, strict=True))
        row = {
            "decoder": name,
            "tokens/s": spread(bench.options.max_new_tokens / found.seconds),
            "speed-up": spread(speedups),
            "predicted": spread(predicted_speedups(found, plain, costs)) if costs else None,
            "accepted": sums.acceptance_rate,
            "a round": sums.tokens_per_round or None,
            "equal": f"{equal}/{len(kinds)}",
            "seconds": found.seconds.tolist(),
        }
        by_kind = {kind: float(np.median(speedups[kinds == kind])) for kind in dict.fromkeys(kinds.tolist())}
        rows.append(row | by_kind)
    return rows


class ReadingTimed(Conductor):
    """Conductor that adds up the seconds of reading prompts."""

    prompts = 0.0

    def _read(self) -> None:
        began = now(self.model.device)
        super()._read()
        self.prompts += now(self.model.device) - began


def together_section(bench: Bench) -> list[Row]:
    """Texts written up to n at a time: tokens per second of all, plain and drafted, and the draft's speed-up.

    Always the same 16 texts; the time to read their prompts is not counted. "of possible" is the gain of plain decoding
    over one text at a time, divided by the gain that steps of n rows allow: n times the cost of a step of one row over
    the cost of a step of n rows. "equal" counts the texts, plain and drafted, that equal those written alone.
    """
    setting, model, count = bench.setting, bench.setting.model, bench.options.max_new_tokens
    told = "model", *(f"exit {layer}" for layer in bench.options.exit_layer or ()), "low bits"
    draft = next(name for name in (*told, *bench.drafts) if name in bench.drafts)
    ways, equal = {"plain": plain(model), "drafted": bench.drafts[draft]}, {}
    prompts = [prompt.ids for prompt in islice(cycle(bench.prompts), TOGETHER[-1])]
    alone = contender(Writer(model, setting.positions), ways["plain"], setting)
    texts = [alone(prompt, count).tokens for prompt in prompts]

    def write(places: int, way: str, count: int) -> float:
        conductor, tasks = ReadingTimed(model, setting.positions, places), []
        for prompt in prompts:
            text, coupling = Text(prompt, Rules(count), model), Coupling(setting.coupling, sum(prompt))
            tasks.append(Task(text, ways[way], setting.params, coupling))
            conductor.submit(tasks[-1])
        began = now(model.device)
        conductor.run()
        seconds = now(model.device) - began - conductor.prompts
        if errors := [task.error for task in tasks if task.error]:
            raise errors[0]
        equal[places, way] = sum(task.text.generated == text[:count] for task, text in zip(tasks, texts, strict=True))
        return seconds

    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    calls = [Call(model, token, filled_cache(model, 1), CONTEXT) for _ in prompts]

    def step(rows: int) -> None:
        torch.cat(answers(calls[:rows])).argmax(-1).tolist()

    for way in ways:  # warm-up
        write(TOGETHER[-1], way, WARM_UP_TOKENS)
    seconds: dict[tuple[int, str], list[float]] = {(places, way): [] for places in TOGETHER for way in ways}
    turns = [*seconds] * bench.options.repeats
    for case in track(turns, "writing together", console=Console(stderr=True), transient=True):
        seconds[case].append(write(*case, count))
    speeds = {case: len(prompts) * count / statistics.median(took) for case, took in seconds.items()}
    costs = take_turns([partial(step, rows) for rows in TOGETHER], STEP_REPEATS, model.device)
    rows = []
    for places, cost in zip(TOGETHER, costs, strict=True):
        fast, drafted = (speeds[places, way] for way in ways)
        possible = speeds[1, "plain"] * places * costs[0].median / cost.median
        row = {"texts": places, "plain tokens/s": fast, "of possible": fast / possible}
        row |= {"draft": draft, "drafted tokens/s": drafted, "speed-up": drafted / fast}
        rows.append(row | {"equal": f"{sum(equal[places, way] for way in ways)}/{len(ways) * len(prompts)}"})
    return rows


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token after a prompt of n tokens, and its ratio to plain decoding's."""
    model, rows = bench.setting.model, []
    contenders = {"plain": contender(Writer(model, max(bench.lengths)), plain(model), bench.setting)}
    contenders |= {name: write for name, write in bench.libraries.items() if name in LIBRARIES}
    for tokens in bench.lengths:
        steps = [partial(write, [0] * tokens, 1) for write in contenders.values()]
        times = take_turns(steps, bench.options.repeats, model.device)
        for name, took in zip(contenders, times, strict=True):
            milliseconds = spread(1e3 * seconds for seconds in (took.fastest, took.median, took.slowest))
            row = {"decoder": name, "tokens": tokens, "ms": milliseconds, "ratio": took.median / times[0].median}
            rows.append(row)
    return rows


def floor_section(bench: Bench) -> list[Row]:
    """Floor of a plain step: the time to read every weight once (of an untied embedding one row)."""
    model, config = bench.setting.model, bench.setting.model.config
    read = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    block = torch.ones(BANDWIDTH_BYTES[model.device.type] // 4, device=model.device)
    speed = block.nbytes / take_turns([block.sum], STEP_REPEATS, model.device)[0].fastest
    size = read * model.dtype.itemsize
    return [{"MB": size / 1e6, "GB/s": speed / 1e9, "ms": 1e3 * size / speed, "tokens/s": speed / size}]


def spread(values: Iterable[float]) -> Row:
    """Median and range of some values."""
    values = list(map(float, values))
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


SECTIONS = {  # in the order in which they are measured: a predicted speed needs the costs
    "costs": costs_section,
    "bits": bits_section,
    "speed": speed_section,
    "first-token": first_token_section,
    "floor": floor_section,
    "together": together_section,
}
