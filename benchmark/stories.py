"""Stories, greedy and sampled: how fast they are drafted, whether they repeat themselves and keep to what was asked."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

from benchmark import Report
from benchmark.contenders import Bench, Prompt, our_contenders
from benchmark.sections import Result, run, speedups, spread
from decoding.corpus.quality import LEAST_MENTIONED, mentioned, repetition
from decoding.corpus.templates import story_prompt
from decoding.sampling import SamplingParams
from model import InputError
from weights.cli.prompt import encode_prompt

TEMPERATURES = (0.0, 0.7, 1.0)
STORIES = 24


def story_prompts(bench: Bench) -> list[Prompt]:
    """Requests as the corpus writer makes them, each with a seed of its own."""
    texts = [story_prompt(random.Random(seed)) for seed in range(4 if bench.options.quick else STORIES)]
    prompts = [("story", text, encode_prompt(bench.setting.tokenizer, text)) for text in texts]
    longest = max(len(ids) for _, _, ids in prompts) + bench.options.max_new_tokens
    if longest > bench.model.max_positions:
        raise InputError(f"a story of {longest} tokens exceeds the model's context: lower --max-new-tokens")
    bench.setting = replace(bench.setting, positions=max(bench.setting.positions, longest))
    return prompts


def measure_stories(bench: Bench) -> list[Report]:
    """A row for each temperature and contender. Texts end where the model ends them, and are plain's in every row."""
    prompts, rows = story_prompts(bench), []
    for temperature in TEMPERATURES:
        setting = replace(bench.setting, params=SamplingParams(temperature))
        contenders = our_contenders(setting, bench.drafts, frozenset(setting.tokenizer.eos_ids))
        contenders = {name: each for name, each in contenders.items() if not name.endswith("adaptive")}
        results = run(contenders, prompts, bench.options.max_new_tokens, bench.options.repeats, bench.model.device)
        rows += [row_of(bench, temperature, name, result, results["plain"]) for name, result in results.items()]
    return rows


def row_of(bench: Bench, temperature: float, name: str, result: Result, plain: Result) -> Report:
    """Speed, and what the texts are like: medians over the prompts but for the share that mentions what was asked."""
    tokenizer = bench.setting.tokenizer
    texts = {key: tokenizer.decode([t for t in ids if t not in tokenizer.eos_ids]) for key, ids in result.texts.items()}
    about = [mentioned(prompt, text) >= LEAST_MENTIONED for (_, prompt), text in texts.items()]
    return {
        "temperature": temperature,
        "name": name,
        "speed_up": spread(speedups(result, plain)),
        "acceptance_rate": result.statistics.acceptance_rate,
        "tokens_per_round": result.statistics.tokens_per_round or None,
        "repeated": statistics.median(map(repetition, texts.values())),
        "mentions": sum(about) / len(about),
        "texts": len(texts),
        "equal": sum(ids == plain.texts[key] for key, ids in result.texts.items()),
        "tokens": statistics.median(map(len, result.texts.values())),
    }
