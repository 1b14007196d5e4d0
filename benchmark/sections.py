"""Sections of the benchmark: costs of steps, speed of texts, context, first token, memory, floor, stories.

The first line of a section's docstring is the title of its table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmark.contenders import ADAPTIVE, Bench, Contender, Prompt, Written, contender, our_contenders
from benchmark.libraries import LIBRARIES, WARM_UP_TOKENS
from benchmark.peak import peak_bytes
from decoding.corpus.quality import LEAST_MENTIONED, mentioned, repetition
from decoding.rounds import Statistics
from decoding.run.chooser import bits_table, plain, planned
from decoding.run.costs import CostTable, measure_costs
from decoding.run.plan_file import DraftPlan
from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from model import LayerPlan
from model.clock import Timing, now, take_turns
from model.decoder import PREFILL_CHUNK
from weights.cli.table import Row
from weights.memory import estimate, held_bytes, parameter_count

LONGEST_VERIFICATION = 16  # tokens
STEP_REPEATS = 7
TEMPERATURES = (0.0, 0.7, 1.0)  # of stories
FILTERED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)  # each filter takes memory
BANDWIDTH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # enough that the time to read them can be measured


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain steps."""
    longest = max([LONGEST_VERIFICATION - 1, *(draft.new_policy().gamma for draft in bench.drafts.values())])
    target = bench.setting.model
    params = bench.setting.params
    lookup = measure_costs(target, None, None, params, longest=longest)
    drafts = bench.drafts.items()
    tables = {name: measure_costs(target, way.model, way.plan, params, verify=lookup.verify) for name, way in drafts}
    bench.costs = {"lookup": lookup} | tables
    rows = [{"step": "verification", "tokens": n, "plain steps": cost} for n, cost in enumerate(lookup.verify, start=1)]
    return rows + [{"step": f"draft step, {name}", "plain steps": bench.costs[name].draft} for name in bench.drafts]


def bits_section(bench: Bench) -> list[Row]:
    """Drafts of all layers in few bits: cost of a step, share of drafts kept, best length, predicted speed-up.

    Measured as the first ``--draft lowbit`` does it.
    """
    table = bits_table(bench.setting)
    columns = zip(table.bits, table.cost, table.acceptance, table.gamma, table.speedup, strict=True)
    names = "bits", "plain steps", "kept", "gamma", "speed-up"
    return [dict(zip(names, row, strict=True)) for row in columns]


class Texts(NamedTuple):
    """Texts of a contender by prompt, and the median seconds of a run, prefill included."""

    written: list[Written]
    seconds: np.ndarray


def time_texts(bench: Bench, contenders: dict[str, Contender], prompts: list[Prompt]) -> dict[str, Texts]:
    """Texts of each contender. After a warm-up each, contenders take turns on each prompt."""
    device, shape = bench.setting.model.device, (bench.options.repeats, len(prompts))
    written = {name: [Written([])] * len(prompts) for name in contenders}
    seconds = {name: np.zeros(shape) for name in contenders}
    for write in contenders.values():
        write(prompts[0].ids, WARM_UP_TOKENS)
    for turn in track([*np.ndindex(shape)], "measuring", console=Console(stderr=True), transient=True):
        prompt = turn[1]
        for name, write in contenders.items():
            began = now(device)
            written[name][prompt] = write(prompts[prompt].ids, bench.options.max_new_tokens)
            seconds[name][turn] = now(device) - began
    return {name: Texts(written[name], np.median(seconds[name], axis=0)) for name in contenders}


def text_columns(texts: Texts, plain: Texts) -> Row:
    """Columns of a table of texts: speed-up over plain decoding, acceptance, texts equal to plain decoding's."""
    sums = Statistics()
    for round in (round for text in texts.written for round in text.rounds):
        sums.add(round)
    equal = sum(text.tokens == other.tokens for text, other in zip(texts.written, plain.written, strict=True))
    return {
        "speed-up": spread(plain.seconds / texts.seconds),
        "accepted": sums.acceptance_rate,
        "a round": sums.tokens_per_round or None,
        "equal": f"{equal}/{len(texts.written)}",
        "seconds": texts.seconds.tolist(),
    }


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
    prompts = [prompt for prompt in bench.prompts if prompt.kind != "stories"]
    kinds = np.array([prompt.kind for prompt in prompts])
    texts = time_texts(bench, our_contenders(bench.setting, bench.drafts) | bench.libraries, prompts)
    rows, plain = [], texts["plain"]
    for name, found in texts.items():
        costs, speedups = bench.costs.get(name.removesuffix(ADAPTIVE)), plain.seconds / found.seconds
        row = {"decoder": name, "tokens/s": spread(bench.options.max_new_tokens / found.seconds)}
        row["predicted"] = spread(predicted_speedups(found, plain, costs)) if costs else None
        by_kind = {kind: float(np.median(speedups[kinds == kind])) for kind in dict.fromkeys(kinds.tolist())}
        rows.append(row | text_columns(found, plain) | by_kind)
    return rows


def stories_section(bench: Bench) -> list[Row]:
    """Stories, as long as the model makes them: medians over the stories (lowest-highest).

    Drafting does not change them. "about it" is the share that mentions the subject of its prompt.
    """
    rows, tokenizer = [], bench.setting.tokenizer
    prompts = [prompt for prompt in bench.prompts if prompt.kind == "stories"]
    for temperature in TEMPERATURES:
        setting = replace(
            bench.setting, params=SamplingParams(temperature), coupling="race" if temperature else "ratio"
        )
        contenders = our_contenders(setting, bench.drafts, frozenset(tokenizer.eos_ids))
        contenders = {name: write for name, write in contenders.items() if not name.endswith(ADAPTIVE)}
        texts = time_texts(bench, contenders, prompts)
        for name, found in texts.items():
            said = [tokenizer.decode(text.tokens) for text in found.written]
            about = [mentioned(p.text, text) >= LEAST_MENTIONED for p, text in zip(prompts, said, strict=True)]
            row = {"temperature": temperature, "decoder": name} | text_columns(found, texts["plain"])
            row |= {"tokens": statistics.median(len(text.tokens) for text in found.written)}
            row |= {"repeated": statistics.median(map(repetition, said)), "about it": sum(about) / len(about)}
            rows.append(row)
    return rows


def context_section(bench: Bench) -> list[Row]:
    """Plain steps after a context, in all n tokens, and the ratio to the shortest.

    The cache holds zeros, which take as long to read as other numbers.
    """
    model = bench.setting.model
    cache = model.new_cache(max(bench.lengths))
    for tensor in [*cache.keys, *cache.values]:
        tensor.zero_()  # unwritten pages are all one page of zeros, which is read faster
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    def step(length: int) -> None:
        cache.lengths = [length - 1] * model.num_layers
        model(token, cache, length - 1)[0, -1].argmax().item()

    times = take_turns([partial(step, length) for length in bench.lengths], STEP_REPEATS, model.device)
    return [{"tokens": n, **timed(took, times[0])} for n, took in zip(bench.lengths, times, strict=True)]


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token after a prompt of n tokens, and its ratio to plain decoding's."""
    model, lengths = bench.setting.model, bench.lengths
    contenders = {"plain": contender(Writer(model, max(lengths)), plain(model), SamplingParams())}
    contenders |= {name: write for name, write in bench.libraries.items() if name in LIBRARIES}
    cases = [(name, length) for name in contenders for length in lengths]
    steps = [partial(contenders[name], [0] * length, 1) for name, length in cases]
    times = dict(zip(cases, take_turns(steps, bench.options.repeats, model.device), strict=True))
    return [{"decoder": name, "tokens": n, **timed(times[name, n], times["plain", n])} for name, n in cases]


def memory_section(bench: Bench) -> list[Row]:
    """Memory of weights and of decoding, as measured and as estimated from the config.

    Measured is the peak of torch's allocations, on the CPU by its profiler. Scratch memory of kernels is not included.
    """
    model, gamma = bench.setting.model, 8
    written = 2 * (gamma + 1)
    positions = min(PREFILL_CHUNK + PREFILL_CHUNK // 2, model.max_positions)
    prompt = [0] * max(1, positions - written)
    drafting = planned(model, DraftPlan(LayerPlan.full(model.num_layers), gamma))
    size = {"prompt": len(prompt), "longest_draft": gamma, "fast_on": model.device}
    needed = estimate(model.config, model.dtype, positions, **size)
    peak = peak_bytes(lambda: contender(Writer(model, positions), drafting, FILTERED)(prompt, written), model.device)
    decoding = f"cache and workspace, a prompt of {len(prompt)} tokens and {written} more"
    parts = {"weights": (held_bytes(model), needed.weights), decoding: (peak, needed.cache + needed.workspace)}
    return [{"part": part, "MB": held / 1e6, "estimated MB": size / 1e6} for part, (held, size) in parts.items()]


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


def timed(took: Timing, unit: Timing) -> Row:
    """Columns of a timed step: milliseconds, and the ratio to the median of ``unit``."""
    seconds = {"median": took.median, "lowest": took.fastest, "highest": took.slowest}
    return {"ms": {name: 1e3 * value for name, value in seconds.items()}, "ratio": took.median / unit.median}


SECTIONS = {  # in the order in which they are measured: a predicted speed needs the costs
    "costs": costs_section,
    "bits": bits_section,
    "speed": speed_section,
    "context": context_section,
    "first-token": first_token_section,
    "memory": memory_section,
    "floor": floor_section,
    "stories": stories_section,
}
