"""Sections of the benchmark, each of which measures one table.

The first line of a section's docstring is the title of its table.
"""

import statistics
from collections.abc import Iterable
from dataclasses import astuple
from functools import partial
from itertools import chain, cycle, islice

import torch
from rich.console import Console
from rich.progress import track

from benchmark.contenders import ADAPTIVE, WARM_UP_TOKENS, Bench, Contender, Written, contender, our_contenders
from decoding.rounds import Statistics
from decoding.run.chooser import Drafting, DraftOptions, bits_table, choose, plain
from decoding.run.costs import CONTEXT, CostTable, filled_cache, measure_costs
from decoding.run.together import Call, Scheduler, Task, answers
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
    known = measure(None, None, longest=longest)
    bench.costs = {name: measure(way.model, way.plan, known=known) for name, way in bench.drafts.items()}
    rows = [{"step": "verification", "tokens": n, "plain steps": cost} for n, cost in enumerate(known.verify, start=1)]
    costs = {name: table.draft for name, table in bench.costs.items() if bench.drafts[name].model}
    return rows + [{"step": f"draft step, {name}", "plain steps": cost} for name, cost in costs.items()]


def bits_section(bench: Bench) -> list[Row]:
    """Drafts of all layers in few bits: cost of a step, share of drafts kept, best length, predicted speed-up.

    Measured as the first ``--draft lowbit`` does it.
    """
    columns, names = astuple(bits_table(bench.setting))[:-1], ("bits", "plain steps", "kept", "gamma", "speed-up")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def time_texts(bench: Bench, contenders: dict[str, Contender]) -> dict[str, list[Written]]:
    """A text of each contender for each prompt, prefill included. After a warm-up each, they take turns per prompt."""
    found: dict[str, list[Written]] = {name: [] for name in contenders}
    for write in contenders.values():
        write(bench.prompts[0][1], WARM_UP_TOKENS)
    for _, prompt in track(bench.prompts, "measuring", console=Console(stderr=True), transient=True):
        for name, write in contenders.items():
            began = now(bench.setting.model.device)
            found[name].append(write(prompt, bench.options.max_new_tokens))
            found[name][-1].seconds = now(bench.setting.model.device) - began
    return found


def predicted_speedup(text: Written, plain: Written, costs: CostTable) -> float:
    """Speed-up of a text over the plain one, computed from measured costs and the rounds of its text.

    A round with a draft of k tokens costs k draft steps and the verification of k + 1 tokens (as in arXiv 2211.17192,
    theorem 3.8), in plain steps of this text. The measured time of prefill is added.
    """
    step = (plain.seconds - plain.prefill) / len(plain.tokens)
    steps = sum(costs.of_round(len(round.drafted), len(round.emitted)) for round in text.rounds)
    return plain.seconds / (text.prefill + step * steps)


def speed_section(bench: Bench) -> list[Row]:
    """Texts, prefill included: medians over the prompts (lowest-highest), medians by kind of prompt."""
    texts = time_texts(bench, our_contenders(bench.setting, bench.drafts) | bench.libraries)
    rows, kinds = [], dict.fromkeys(kind for kind, _ in bench.prompts)
    for name, found in texts.items():
        pairs, sums = list(zip(found, texts["plain"], strict=True)), Statistics()
        for round in chain.from_iterable(text.rounds for text in found):
            sums.add(round)
        costs = bench.costs.get(name.removesuffix(ADAPTIVE))
        speedups = [plain.seconds / text.seconds for text, plain in pairs]
        row = {
            "decoder": name,
            "tokens/s": spread(bench.options.max_new_tokens / text.seconds for text in found),
            "speed-up": spread(speedups),
            "predicted": costs and spread(predicted_speedup(*pair, costs) for pair in pairs),
            "accepted": sums.acceptance_rate,
            "a round": sums.tokens_per_round or None,
            "equal": f"{sum(text.tokens == plain.tokens for text, plain in pairs)}/{len(pairs)}",
            "seconds": [text.seconds for text in found],
        }
        for kind in kinds:
            of_kind = [ratio for ratio, (its, _) in zip(speedups, bench.prompts, strict=True) if its == kind]
            row[kind] = statistics.median(of_kind)
        rows.append(row)
    return rows


def together_section(bench: Bench) -> list[Row]:
    """Texts written up to n at a time, plain and drafted: tokens per second of all, and the speed-up of the draft.

    Always the same 16 texts, without the time until their first tokens. "of possible" is the gain of plain decoding
    over one text at a time, divided by the gain that steps of n rows allow: n times the cost of a step of one row over
    the cost of a step of n rows. "equal" counts the texts that equal those written alone.
    """
    setting, model, count = bench.setting, bench.setting.model, bench.options.max_new_tokens
    told = "model", *(f"exit {layer}" for layer in bench.options.exit_layer or ()), "low bits"
    draft = next(name for name in (*told, *bench.drafts) if name in bench.drafts)
    ways = {"plain": plain(model), draft: bench.drafts[draft], "auto": choose(DraftOptions("auto"), setting)}
    prompts = [prompt for _, prompt in islice(cycle(bench.prompts), TOGETHER[-1])]
    alone = contender(Writer(model, setting.positions), ways["plain"], setting)
    texts = [alone(prompt, count).tokens for prompt in prompts]

    def write(scheduler: Scheduler, way: Drafting, count: int) -> tuple[float, int]:
        """Seconds, and the number of texts that equal those written alone."""
        tasks = []
        for prompt in prompts:
            text, coupling = Text(prompt, Rules(count), model), Coupling(setting.coupling, sum(prompt))
            tasks.append(Task(text, way, setting.params, coupling))
        began = now(model.device)
        scheduler.write_all(tasks)
        seconds = now(model.device) - began
        return seconds, sum(task.text.generated == text[:count] for task, text in zip(tasks, texts, strict=True))

    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    calls = [Call(model, token, filled_cache(model, 1), CONTEXT) for _ in prompts]
    steps = {n: lambda n=n: torch.cat(answers(calls[:n])).argmax(-1).tolist() for n in TOGETHER}
    rows: list[Row] = []
    for slots in track(TOGETHER, "writing together", console=Console(stderr=True)):
        # Just before the texts, since the speed of the memory changes within minutes.
        measured = take_turns([steps[n] for n in sorted({1, slots})], STEP_REPEATS, model.device)
        allowed = slots * statistics.median(measured[0]) / statistics.median(measured[-1])
        for name, way in ways.items():
            scheduler = Scheduler(model, setting.positions, slots)
            reading, _ = write(scheduler, way, 1)
            seconds, equal = write(scheduler, way, count)
            speed = len(prompts) * (count - 1) / (seconds - reading)
            row = {"texts": slots, "decoder": name, "tokens/s": speed, "equal": f"{equal}/{len(prompts)}"}
            if name == "plain":
                plainly, alone_speed = speed, rows[0]["tokens/s"] if rows else speed
                row["of possible"] = speed / alone_speed / allowed
            rows.append(row | {"speed-up": speed / plainly})
    return rows


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token after a prompt of n tokens, and its ratio to plain decoding's."""
    model, rows = bench.setting.model, []
    contenders = {"plain": contender(Writer(model, max(bench.lengths)), plain(model), bench.setting)}
    contenders |= {name: write for name, write in bench.libraries.items() if name in bench.options.against}
    for tokens in bench.lengths:
        steps = [partial(write, [0] * tokens, 1) for write in contenders.values()]
        plainly, *_ = times = [seconds for (seconds,) in take_turns(steps, 1, model.device)]
        for name, took in zip(contenders, times, strict=True):
            rows.append({"decoder": name, "tokens": tokens, "ms": 1e3 * took, "ratio": took / plainly})
    return rows


def floor_section(bench: Bench) -> list[Row]:
    """Floor of a plain step: the time to read every weight once (of an untied embedding one row)."""
    model, config = bench.setting.model, bench.setting.model.config
    read = parameter_count(config) - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    block = torch.ones(BANDWIDTH_BYTES[model.device.type] // 4, device=model.device)
    speed = block.nbytes / min(take_turns([block.sum], STEP_REPEATS, model.device)[0])
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
