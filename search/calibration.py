"""A chat model writes text, many rows at a time: calibration text of the plan search, or a corpus to train on.

    python -m search.calibration --model DIR --tokens N --out FILE

There is no padding. The rows of a batch advance together, a position a step: a row whose prompt is longer than
that takes its prompt's next token, the others a token drawn for them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from decoding.randomness import inverse_cdf
from decoding.sampling import SamplingParams, distribution
from decoding.stopping import StopRules
from model import Decoder, InputError, parse_config
from model.diagnose import explain_nonfinite
from model.fast import accelerate
from model.layers import wide_dtype
from search.templates import story_prompt
from search.text_file import KINDS, TextFile, WrittenText
from weights.command_line import OneLineParser
from weights.device import keep_freed_memory, pick_device
from weights.files import read_json
from weights.load import DTYPES, load_model, stored_dtype
from weights.memory import LOGIT_COPIES, Memory, cache_bytes, free_bytes, layer_bytes, weight_bytes
from weights.names import model_folder
from weights.tokenizer import Tokenizer

BATCH = 128
COMPACT_SHARE = 0.75  # ended rows leave the batch once no more than this share of its rows is alive
MESSAGE_TOKENS = 64  # of a user's message that the model writes itself, at most
PROMPT_TOKENS = 256  # of a prompt with its template: a generous guess, for the memory estimate only
FRUITLESS_ROWS = 256  # after so many rows without a new text, no new one is to be expected


@dataclass
class Rows:
    """The texts of a batch that are still in its cache, one row each.

    ``index`` ``[rows]`` says which prompt a row continues; ``tokens`` ``[rows, capacity]`` int64 hold prompt and
    output; ``prompts`` and ``ends`` ``[rows]`` are the positions where the output begins and where the text
    ends at the latest; ``numbers`` ``[rows, max_new_tokens]`` float64 in [0, 1) are all the chance there is.
    """

    index: Tensor
    tokens: Tensor
    prompts: Tensor
    ends: Tensor
    numbers: Tensor

    def select(self, which: Tensor) -> Rows:
        """The rows at these places, ``[n]`` int64."""
        return Rows(*(getattr(self, field.name)[which] for field in fields(self)))

    def output(self) -> Iterator[tuple[int, list[int]]]:
        """The index and the output of each row."""
        columns = (self.index, self.prompts, self.ends, self.tokens)
        for index, prompt, end, tokens in zip(*(column.tolist() for column in columns), strict=True):
            yield index, tokens[prompt:end]


@torch.inference_mode()
def sample_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    params: SamplingParams,
    eos_ids: Collection[int],
    seed: int,
    batch: int = BATCH,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The model's continuation of each prompt, in their order; greedy at temperature 0.

    A text ends with the first of ``eos_ids`` (which it keeps), after ``max_new_tokens`` or where the model's
    context is full. Up to ``batch`` prompts of similar length are continued together. Row i draws from a random
    stream of its own, made of ``seed`` and i: its text does not depend on which rows share its batch, but for
    the rounding of the model's products. ``on_tokens`` hears how many tokens each step has written.
    Raises InputError for a prompt that is empty, does not fit the context or holds unknown ids, for
    ``max_new_tokens`` or ``batch`` below 1, and when the logits are not numbers.
    """
    StopRules(max_new_tokens)  # refuses what is below 1
    if batch < 1:
        raise InputError(f"batch must be at least 1, found {batch}")
    for prompt in prompts:
        check_prompt(model, prompt)
    texts: list[list[int]] = [[] for _ in prompts]
    ends = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=model.device)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(prompts), batch):
        rows = lay_out(model, prompts, by_length[first : first + batch], max_new_tokens, seed)
        for index, text in write_rows(model, rows, params, ends, on_tokens):
            texts[index] = text
    return texts


def check_prompt(model: Decoder, prompt: Sequence[int]) -> None:
    """Raises InputError for a prompt that this model cannot continue."""
    if not 0 < len(prompt) < model.max_positions:
        raise InputError(
            f"a prompt has {len(prompt)} tokens: it must have from 1 to {model.max_positions - 1}, one less than the "
            "model's context"
        )
    if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
        raise InputError(
            f"a prompt holds a token id outside 0..{model.vocab_size - 1}, the ids of this model: use its own tokenizer"
        )


def lay_out(
    model: Decoder, prompts: Sequence[Sequence[int]], which: Sequence[int], max_new_tokens: int, seed: int
) -> Rows:
    """The prompts at these indices as rows, with room for their output and their random numbers."""
    lengths = torch.tensor([len(prompts[index]) for index in which])
    ends = (lengths + max_new_tokens).clamp(max=model.max_positions)
    tokens = torch.zeros(len(which), int(ends.max()), dtype=torch.int64)
    for row, index in enumerate(which):
        tokens[row, : lengths[row]] = torch.tensor(prompts[index])
    streams = [np.random.SeedSequence(seed % 2**64, spawn_key=(index,)) for index in which]
    most = int((ends - lengths).max())
    numbers = torch.from_numpy(np.stack([np.random.default_rng(stream).random(most) for stream in streams]))
    rows = (torch.tensor(which), tokens, lengths, ends, numbers)
    return Rows(*(column.to(model.device) for column in rows))


def write_rows(
    model: Decoder, rows: Rows, params: SamplingParams, eos_ids: Tensor, on_tokens: Callable[[int], None]
) -> Iterator[tuple[int, list[int]]]:
    """Continue all rows together until every text has ended; yields index and output of each, in no order."""
    batch, capacity = rows.tokens.shape
    cache = model.new_cache(capacity, batch=batch)
    position = int(rows.prompts.min())
    while True:
        # Invariant: every row has its token at each position before this one, and one row at least has none here.
        model.prefill(rows.tokens[:, cache.length : position - 1], cache, cache.length)
        logits = model(rows.tokens[:, position - 1 : position], cache, position - 1)[:, -1]
        probs = row_distributions(logits, rows.tokens[:, :position], params)
        written = position - rows.prompts  # how many tokens of output a row has; below 0: still in its prompt
        numbers = rows.numbers.gather(1, written.clamp(0, rows.numbers.shape[1] - 1)[:, None])[:, 0]
        drawn = inverse_cdf(probs, numbers)
        own = (written >= 0) & (position < rows.ends)
        rows.tokens[:, position] = torch.where(own, drawn, rows.tokens[:, position])
        rows.ends = torch.where(own & torch.isin(drawn, eos_ids), position + 1, rows.ends)
        alive = rows.ends > position + 1
        # Of probability 0 is only what is drawn from a row of zeros: its logits were no numbers.
        broken = own & (probs.gather(1, drawn[:, None])[:, 0] == 0)
        soonest = torch.where(alive, rows.prompts, capacity).min()
        # The one read of the host in a step.
        new, left, unusable, soonest = torch.stack((own.sum(), alive.sum(), broken.sum(), soonest)).tolist()
        on_tokens(new)
        if unusable:
            text = rows.tokens[broken][0, :position]
            raise explain_nonfinite(model, model.new_cache(position), text)
        if not left:
            break
        if left <= COMPACT_SHARE * len(alive):
            yield from rows.select((~alive).nonzero()[:, 0]).output()
            kept = alive.nonzero()[:, 0]
            rows = rows.select(kept)
            cache.keep_rows(kept)
        position = max(position + 1, soonest)
    yield from rows.output()


def row_distributions(logits: Tensor, tokens: Tensor, params: SamplingParams) -> Tensor:
    """``[rows, vocab]`` logits, each row after its own text in ``tokens`` ``[rows, n]`` -> probabilities.

    ``distribution`` takes its rows for one text's successive positions, but only the repetition penalty looks
    at that text: without one, all rows can go together.
    """
    if params.repetition_penalty == 1:
        return distribution(logits, tokens[0], params)
    return torch.cat([distribution(row[None], text, params) for row, text in zip(logits, tokens, strict=True)])


@dataclass(frozen=True)
class UserTurn:
    """The chat template around a user's message: tokens before it, and those from its end-of-turn token on."""

    opening: list[int]
    closing: list[int]

    @staticmethod
    def of(tokenizer: Tokenizer) -> UserTurn:
        """What is common to two conversations that differ in all of their message.

        Raises InputError when the template does not let the model end a user's turn: when there is none, or
        no control token ends the message.
        """
        if tokenizer.chat_template is None:
            raise InputError("this model has no chat template: give --kind story")
        message, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Apples", "zebra?"))
        opening = common_beginning(message, other)
        closing = common_beginning(message[::-1], other[::-1])[::-1]
        inside = tokenizer.decode(message[len(opening) : len(message) - len(closing)])
        control = tokenizer.vocabulary.special.values()
        if inside != "Apples" or not opening or not closing or closing[0] not in control:
            raise InputError("this model's chat template ends a user's turn with no control token: give --kind story")
        return UserTurn(opening, closing)


def common_beginning(one: list[int], other: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


class Author:
    """A model that writes both sides of a conversation, a batch of them at a time."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        params: SamplingParams,
        max_new_tokens: int,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        """``max_new_tokens`` bounds a response; ``on_tokens`` hears how many tokens of responses a step has written."""
        self.model, self.tokenizer, self.params = model, tokenizer, params
        self.max_new_tokens, self.on_tokens = max_new_tokens, on_tokens
        self.control = frozenset(tokenizer.vocabulary.special.values())

    def write(self, kind: str, rows: int, rng: random.Random) -> list[WrittenText]:
        """Up to ``rows`` texts, "story" or "chat": a row that says nothing or holds a control token is left out."""
        prompts = self.stories(rows, rng) if kind == "story" else self.chats(rows, rng)
        eos_ids = self.tokenizer.eos_ids
        responses = self.sample([ids for _, ids in prompts], self.max_new_tokens, eos_ids, rng, self.on_tokens)
        texts = []
        for (prompt, _), response in zip(prompts, responses, strict=True):
            finished = response[-1] in eos_ids
            said = self.text(response[:-1] if finished else response)
            if said is not None:
                texts.append(WrittenText(kind, prompt, said, finished, self.params.temperature))
        return texts

    def stories(self, rows: int, rng: random.Random) -> list[tuple[str, list[int]]]:
        """Requests for a story, with their ids: a chat turn, or plain text where there is no template."""
        prompts = [story_prompt(rng) for _ in range(rows)]
        if self.tokenizer.chat_template is None:
            return [(prompt, self.tokenizer.encode(prompt)) for prompt in prompts]
        return [(prompt, self.tokenizer.encode_chat([{"role": "user", "content": prompt}])) for prompt in prompts]

    def chats(self, rows: int, rng: random.Random) -> list[tuple[str, list[int]]]:
        """Messages that the model writes in the user's place, with the ids of the conversations they begin.

        Those without an end are left out.
        """
        turn = UserTurn.of(self.tokenizer)
        ends = self.tokenizer.eos_ids.union(turn.closing[:1])
        chats = []
        for *message, end in self.sample([turn.opening] * rows, MESSAGE_TOKENS, ends, rng):
            said = self.text(message)
            if end == turn.closing[0] and said is not None:
                chats.append((said, [*turn.opening, *message, *turn.closing]))
        return chats

    def sample(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int],
        rng: random.Random,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> list[list[int]]:
        """The continuation of each prompt, all in one batch."""
        return sample_texts(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            params=self.params,
            eos_ids=eos_ids,
            seed=rng.getrandbits(64),
            batch=max(1, len(prompts)),
            on_tokens=on_tokens,
        )

    def text(self, tokens: list[int]) -> str | None:
        """What these tokens say; None when that is nothing, or when there is a control token among them."""
        if not self.control.isdisjoint(tokens):
            return None
        text = self.tokenizer.decode(tokens).rstrip("\ufffd")  # a text may be cut off inside a character
        return text if text.strip() else None


class Bar:
    """A progress bar on standard error: tokens of the file, those being written included, and their rate."""

    def __init__(self, total: int, done: int) -> None:
        self.progress = Progress(
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens, {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task("", total=total, completed=done, rate=0.0)
        self.written, self.began = 0, time.perf_counter()

    def advance(self, count: int) -> None:
        """So many tokens were written, of which none may stay: the file has the last word."""
        self.written += count
        self.progress.update(self.task, advance=count, rate=self.written / (time.perf_counter() - self.began))

    def settle(self, tokens: int) -> None:
        """So many tokens are in the file."""
        self.progress.update(self.task, completed=tokens)


def write_file(author: Author, file: TextFile, options: argparse.Namespace, bar: Bar) -> None:
    """Add batches of texts to ``file`` until its responses have ``options.tokens`` tokens.

    What a batch is made of depends on the seed and on what the file holds, nothing else. So a killed run goes
    on as if nothing had been, and no batch is like an earlier one: that one found fewer lines in the file.
    Raises InputError when the model writes nothing new any more.
    """
    fruitless = 0  # rows since the last new text
    while (missing := options.tokens - file.total_tokens) > 0:
        if fruitless >= FRUITLESS_ROWS:
            raise InputError(
                f"the last {fruitless} texts were all empty, unusable or in {file.path} already: raise --temperature "
                "or --top-k"
            )
        kinds = KINDS if options.kind == "both" else (options.kind,)
        kind = min(kinds, key=lambda kind: file.tokens[kind])
        rows, lines = min(options.batch, 1 + missing // options.max_new_tokens), file.lines
        file.append(author.write(kind, rows, random.Random(f"{options.seed} {lines} {fruitless}")))
        bar.settle(file.total_tokens)
        fruitless = 0 if file.lines > lines else fruitless + rows


def check_fits(folder: Path, options: argparse.Namespace, device: torch.device) -> None:
    """Raises InputError when the batch needs more memory than is free on the device."""
    config = parse_config(read_json(folder / "config.json"))
    dtype = DTYPES.get(options.dtype) or stored_dtype(folder)
    positions = min(PROMPT_TOKENS + options.max_new_tokens, config.max_positions)
    prefill = layer_bytes(config, dtype, min(PROMPT_TOKENS, positions), 0)
    logits = config.vocab_size * LOGIT_COPIES * wide_dtype(dtype).itemsize
    memory = Memory(
        weights=weight_bytes(config, dtype, device),
        cache=options.batch * cache_bytes(config, dtype, positions),
        workspace=options.batch * max(prefill, logits),
        positions=positions,
    )
    free = free_bytes(device)
    if memory.total > free:
        raise InputError(f"a batch of {options.batch} does not fit on {device}: {memory.describe(free)}; lower --batch")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m search.calibration", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or a name under weights/")
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="tokens of responses wanted in the file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl; an earlier one is continued")
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="both", help="children's stories, or its own chats")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="default: 0.8")
    parser.add_argument("--top-k", type=int, default=80, metavar="K", help="0: off; default: 80")
    parser.add_argument("--max-new-tokens", type=int, default=320, metavar="N", help="of a response; default: 320")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="B", help=f"texts at a time; default: {BATCH}")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto", help="default: the checkpoint's")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Everything after the arguments are parsed. What can be refused is refused before the weights are loaded."""
    for name in ("tokens", "batch", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {getattr(options, name)}")
    params = SamplingParams(options.temperature, options.top_k)
    folder, device = model_folder(options.model), pick_device(options.device)
    tokenizer = Tokenizer(folder)
    if options.kind != "story":
        UserTurn.of(tokenizer)
    check_fits(folder, options, device)
    file = TextFile(options.out, lambda text: len(tokenizer.vocabulary.encode(text, parse_special=False)))
    keep_freed_memory()
    model = accelerate(load_model(folder, DTYPES.get(options.dtype), device))
    bar = Bar(options.tokens, file.total_tokens)
    author = Author(model, tokenizer, params, options.max_new_tokens, bar.advance)
    with bar.progress:
        write_file(author, file, options, bar)
    print(f"{file.path}: {file.lines} texts, {file.total_tokens} tokens", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {options.out} holds whole texts; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
