"""Sections of the benchmark, each of which measures one table.

The first line of a section's docstring is the title of its table.
"""

import json
import statistics
from collections.abc import Iterable
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmark.contenders import (
    ADAPTIVE,
    WARM_UP_TOKENS,
    Bench,
    Contender,
    Written,
    contender,
    our_contenders,
)
from cli.files import read_json
from cli.table import Row
from decoding.drafters import ForcedTokens
from decoding.grammar import Grammar
from decoding.policies import FixedLength
from decoding.rounds import Statistics
from decoding.run.chooser import Drafting, DraftOptions, Setting, choose, plain
from decoding.run.options import vocabulary
from decoding.run.prompt import encode_prompt
from decoding.run.together import Call, Scheduler, Task, answers
from decoding.run.writer import Writer
from decoding.text import Rules, Text
from decoding.verify import Coupling
from model import Decoder
from model.clock import now, take_turns
from search.costs import CostTable, measure_costs
from weights.memory import parameter_count

LONGEST_VERIFICATION = 16  # tokens
STEP_REPEATS = 7
SCHEMAS = Path(__file__).with_name("schemas.json")
STRUCTURED_TOKENS, STRUCTURED_TURNS = 256, 5  # longest text, and texts of each draft and schema
STRUCTURED_POSITIONS = 1024  # with the prompt, which names the schema
TOGETHER = (1, 2, 4, 8, 16)  # texts at a time
# enough that the time to read them can be measured
BANDWIDTH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


def costs_section(bench: Bench) -> list[Row]:
    """Costs of verifications and of draft steps, in plain rounds."""
    longest = max(
        [LONGEST_VERIFICATION - 1, *(draft.new_policy().gamma for draft in bench.drafts.values())]
    )
    prompts = [prompt for _, prompt in bench.prompts]
    tables = measure_costs(bench.setting, prompts, [*bench.drafts.values()], longest)
    bench.costs = dict(zip(bench.drafts, tables, strict=True))
    rows: list[Row] = [
        {"step": "verification", "tokens": n, "plain rounds": cost}
        for n, cost in enumerate(tables[0].verify, start=1)
    ]
    return rows + [
        {"step": f"draft step, {name}", "plain rounds": bench.costs[name].draft}
        for name, draft in bench.drafts.items()
        if draft.model
    ]


def time_texts(bench: Bench, contenders: dict[str, Contender]) -> dict[str, list[Written]]:
    """A text of each contender for each prompt, prefill included. After a warm-up each, they take
    turns per prompt.
    """
    found: dict[str, list[Written]] = {name: [] for name in contenders}
    for write in contenders.values():
        write(bench.prompts[0][1], WARM_UP_TOKENS)
    for _, prompt in track(
        bench.prompts, "measuring", console=Console(stderr=True), transient=True
    ):
        for name, write in contenders.items():
            began = now(bench.setting.model.device)
            found[name].append(write(prompt, bench.options.max_new_tokens))
            found[name][-1].seconds = now(bench.setting.model.device) - began
    return found


def predicted_speedup(text: Written, plain: Written, costs: CostTable) -> float:
    """Speed-up of a text over the plain one, computed from measured costs and the rounds of its
    text.

    A round with a draft of k tokens costs k draft steps and the verification of k + 1 tokens (as in
    arXiv 2211.17192, theorem 3.8), in plain rounds of this text. The measured time of prefill is
    added.
    """
    step = (plain.seconds - plain.prefill) / len(plain.tokens)
    steps = sum(costs.of_round(len(round.drafted)) for round in text.rounds)
    return plain.seconds / (text.prefill + step * steps)


def speed_section(bench: Bench) -> list[Row]:
    """Texts, prefill included: medians over the prompts (lowest-highest), medians by kind of
    prompt.
    """
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
            of_kind = [
                ratio
                for ratio, (its, _) in zip(speedups, bench.prompts, strict=True)
                if its == kind
            ]
            row[kind] = statistics.median(of_kind)
        rows.append(row)
    return rows


def together_section(bench: Bench) -> list[Row]:
    """Texts written up to n at a time, plain and drafted: tokens per second of all, and the
    speed-up of the draft.

    Always the same 16 texts, without the time until their first tokens. "of possible" is the gain
    of plain decoding over one text at a time, divided by the gain that steps of n rows allow: n
    times the cost of a step of one row over the cost of a step of n rows. "equal" counts the texts
    that equal those written alone.
    """
    setting, model, count = bench.setting, bench.setting.model, bench.options.max_new_tokens
    told = "model", *(f"exit {layer}" for layer in bench.options.exit_layer or ()), "low bits"
    draft = next(name for name in (*told, *bench.drafts) if name in bench.drafts)
    ways = {
        "plain": plain(model),
        draft: bench.drafts[draft],
        "auto": choose(DraftOptions("auto"), setting),
    }
    prompts = [prompt for _, prompt in islice(cycle(bench.prompts), TOGETHER[-1])]
    alone = contender(Writer(model, setting.positions), ways["plain"], setting)
    texts = [alone(prompt, count).tokens for prompt in prompts]

    def write(scheduler: Scheduler, way: Drafting, count: int) -> tuple[float, int]:
        """Seconds, and the number of texts that equal those written alone."""
        tasks = []
        for prompt in prompts:
            text, coupling = (
                Text(prompt, Rules(count), model),
                Coupling(setting.coupling, sum(prompt)),
            )
            tasks.append(Task(text, way, setting.params, coupling))
        began = now(model.device)
        scheduler.write_all(tasks)
        seconds = now(model.device) - began
        return seconds, sum(
            task.text.generated == text[:count] for task, text in zip(tasks, texts, strict=True)
        )

    calls = [step_after(model, prompt) for prompt in prompts]
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
            row = {
                "texts": slots,
                "decoder": name,
                "tokens/s": speed,
                "equal": f"{equal}/{len(prompts)}",
            }
            if name == "plain":
                plainly, alone_speed = speed, rows[0]["tokens/s"] if rows else speed
                row["of possible"] = speed / alone_speed / allowed
            rows.append(row | {"speed-up": speed / plainly})
    return rows


def step_after(model: Decoder, prompt: list[int]) -> Call:
    """The plain step after a prompt."""
    writer = Writer(model, len(prompt))
    writer.begin(prompt)
    last = torch.tensor([prompt[-1:]], device=model.device)
    return Call(model, last, writer.cache, len(prompt) - 1)


def first_token_section(bench: Bench) -> list[Row]:
    """Time to the first token after a prompt of n tokens, and its ratio to plain decoding's."""
    model, rows = bench.setting.model, []
    contenders = {
        "plain": contender(Writer(model, max(bench.lengths)), plain(model), bench.setting)
    }
    contenders |= {
        name: write for name, write in bench.libraries.items() if name in bench.options.against
    }
    for tokens in bench.lengths:
        steps = [partial(write, [0] * tokens, 1) for write in contenders.values()]
        plainly, *_ = times = [seconds for (seconds,) in take_turns(steps, 1, model.device)]
        for name, took in zip(contenders, times, strict=True):
            rows.append(
                {"decoder": name, "tokens": tokens, "ms": 1e3 * took, "ratio": took / plainly}
            )
    return rows


def floor_section(bench: Bench) -> list[Row]:
    """Floor of a plain step: the time to read every weight once (of an untied embedding one
    row); on a GPU also the most memory that torch has held so far.
    """
    model, config = bench.setting.model, bench.setting.model.config
    read = parameter_count(config) - (
        0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    )
    block = torch.ones(BANDWIDTH_BYTES[model.device.type] // 4, device=model.device)
    speed = block.nbytes / min(take_turns([block.sum], STEP_REPEATS, model.device)[0])
    size = read * model.dtype.itemsize
    floor = {
        "MB": size / 1e6,
        "GB/s": speed / 1e9,
        "ms": 1e3 * size / speed,
        "tokens/s": speed / size,
    }
    if model.device.type == "cuda":
        floor["peak MB"] = (torch.cuda.max_memory_allocated(model.device) - block.nbytes) / 1e6
    return [floor]


def structured_section(bench: Bench) -> list[Row]:
    """Texts under JSON schemas: tokens per round and speed-up over plain constrained decoding,
    without the prompt.

    Each schema is written plainly and by each draft in turns; "speed-up" is the median of the
    turns, and the last row its geometric mean. "equal" counts the texts that equal the plain one.
    """
    setting, rows = bench.setting, []
    tokens = vocabulary(setting.tokenizer, setting.model.vocab_size)
    ways = {"plain": plain(setting.model), "forced": forced_drafting(setting)}
    ways |= {name: way for name, way in bench.drafts.items() if name == "low bits"}
    ways["auto"] = choose(DraftOptions("auto"), setting)
    writer = Writer(setting.model, STRUCTURED_POSITIONS, setting.tokenizer.token_bytes)
    for name, each in track(read_json(SCHEMAS).items(), "schemas", console=Console(stderr=True)):
        schema = json.dumps(each["schema"])
        grammar = Grammar("json_schema", schema, tokens)
        rules = Rules(STRUCTURED_TOKENS, setting.tokenizer.eos_ids, grammar=grammar)
        writer.begin(encode_prompt(setting.tokenizer, each["request"], schema=schema))
        turns = []
        for turn in range(
            1 + (1 if bench.options.quick else STRUCTURED_TURNS)
        ):  # the first warms up
            coupling = Coupling(setting.coupling, turn)
            turns.append(
                {
                    way: writer.write(writer.new_text(rules), drafting, setting.params, coupling)
                    for way, drafting in ways.items()
                }
            )
        plainly = [turn["plain"] for turn in turns]
        for way in list(ways)[1:]:
            samples = [turn[way] for turn in turns]
            pairs = list(zip(samples, plainly, strict=True))
            speeds = [each.speed / base.speed for each, base in pairs[1:]]
            equal = sum(each.tokens == base.tokens for each, base in pairs)
            row = {"schema": name, "decoder": way, "tokens": samples[-1].statistics.tokens}
            row |= {"a round": samples[-1].statistics.tokens_per_round, "speed-up": spread(speeds)}
            rows.append(row | {"equal": f"{equal}/{len(pairs)}"})
    for way in list(ways)[1:]:
        medians = [row["speed-up"]["median"] for row in rows if row["decoder"] == way]
        mean = statistics.geometric_mean(medians)
        rows.append({"schema": "geometric mean", "decoder": way, "speed-up": mean})
    return rows


def forced_drafting(setting: Setting) -> Drafting:
    """Drafts of the tokens that the grammar forces, and no others."""
    model = setting.model
    return Drafting(
        "forced tokens",
        lambda cache: ForcedTokens(model.vocab_size, model.device),
        lambda: FixedLength(LONGEST_VERIFICATION - 1),
    )


def spread(values: Iterable[float]) -> Row:
    """Median and range of some values."""
    values = list(map(float, values))
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


SECTIONS = {  # in the order in which they are measured: a predicted speed needs the costs
    "costs": costs_section,
    "speed": speed_section,
    "first-token": first_token_section,
    "floor": floor_section,
    "structured": structured_section,
    "together": together_section,
}
