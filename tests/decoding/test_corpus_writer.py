"""Batches of texts: each row is what the production loop would write alone, and the file survives any end."""

from __future__ import annotations

import json
import os
import random
import resource
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoding.corpus import __main__ as corpus
from decoding.corpus import author as authors
from decoding.corpus import templates
from decoding.corpus.author import UserTurn
from decoding.corpus.batch import COMPACT_SHARE, sample_texts
from decoding.corpus.text_file import DISTINCT_CHARACTERS, TextFile, WrittenText
from decoding.policies import FixedLength
from decoding.proof.judge import Setup, run_loop
from decoding.proof.plain_law import Request
from decoding.randomness import Place
from decoding.sampling import SamplingParams, distribution
from model import Decoder, InputError
from tests.folders import VOCAB_SIZE, write_folder
from tests.laws import no_draft, tiny_model
from weights.tokenizer import Tokenizer

FAMILIES = ["llama", "gemma2"]
EOS = 1
SHORT = [[0, 2, 5], [3], [4, 4, 1, 0, 2, 3, 5], [2], [5, 1], [0, 0, 3, 2, 1], [5], [4, 2]]
PROMPTS = [[4] * 57, *SHORT, [0] * 55, [5, 5, 3] * 18]  # the long ones nearly fill the context
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\\n' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
LINE_AFTER = "{% for message in messages %}{{ message['content'] + '\\n\\n' }}{% endfor %}"


def alone(model: Decoder, prompt: list[int], params: SamplingParams, max_new_tokens: int) -> list[int]:
    """What the production loop writes for one prompt, greedily."""
    request = Request(tuple(prompt), params, max_new_tokens, frozenset([EOS]))
    tokens, _ = run_loop(model, request, Setup(no_draft, lambda: FixedLength(0)), First())
    return list(tokens)


class First:
    """Chance that always takes the likeliest token: all that a one-hot distribution needs."""

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        return probs.argmax()

    def accept(self, probabilities: Tensor) -> Tensor:
        return probabilities >= 1


@pytest.mark.parametrize("penalty", [1.0, 1.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_what_the_loop_writes_for_its_prompt_alone(family: str, penalty: float) -> None:
    """Greedy, in float64: prompts of any lengths, rows that end early, rows that fill the context, in order."""
    params = SamplingParams(repetition_penalty=penalty)
    endings: Counter[str] = Counter()
    for seed in (2, 3):
        model = tiny_model(family, vocab=6, seed=seed)
        expected = [alone(model, prompt, params, 20) for prompt in PROMPTS]
        for batch in (4, 128):
            texts = sample_texts(model, PROMPTS, max_new_tokens=20, params=params, eos_ids=[EOS], seed=0, batch=batch)
            assert texts == expected
        endings.update("eos" if EOS in text else "full" if len(text) < 20 else "budget" for text in expected)
    assert min(endings[why] for why in ("eos", "full", "budget")) > 1


def replayed(model: Decoder, prompt: list[int], params: SamplingParams, numbers: list[float]) -> list[int]:
    """One text by the definition: no cache, no batch, each token the inverse of the cumulative distribution."""
    tokens = list(prompt)
    for number in numbers:
        probs = distribution(model(torch.tensor([tokens]))[0, -1:], torch.tensor(tokens), params)[0].tolist()
        tokens.append(next(token for token, reached in enumerate(accumulate(probs)) if reached > number))
        if tokens[-1] == EOS or len(tokens) == model.max_positions:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0), SamplingParams(0.7, top_k=3, top_p=0.9), SamplingParams(1.3, repetition_penalty=1.4)],
    ids=["plain", "filtered", "penalised"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_inverts_its_own_distribution_at_its_own_random_numbers(family: str, params: SamplingParams) -> None:
    model = tiny_model(family, vocab=6, seed=3)
    streams = [np.random.SeedSequence(7, spawn_key=(row,)) for row in range(len(PROMPTS))]
    numbers = [np.random.default_rng(stream).random(12).tolist() for stream in streams]
    expected = [replayed(model, prompt, params, row) for prompt, row in zip(PROMPTS, numbers, strict=True)]
    for batch in (1, 4, 128):
        assert (
            sample_texts(model, PROMPTS, max_new_tokens=12, params=params, eos_ids=[EOS], seed=7, batch=batch)
            == expected
        )
    assert len({len(text) for text in expected}) > 2


def test_sampled_texts_follow_the_models_law() -> None:
    """Chi-square over 4000 rows; exceeded by chance once in 10⁶ seeds (14 degrees of freedom)."""
    model, params = tiny_model("llama", seed=1), SamplingParams(1.5)
    law: dict[tuple[int, ...], float] = {}

    def expand(text: tuple[int, ...], weight: float) -> None:
        if len(text) == 3 or EOS in text:
            law[text] = weight
            return
        tokens = torch.tensor([[0, *text]])
        for token, chance in enumerate(distribution(model(tokens)[0, -1:], tokens[0], params)[0].tolist()):
            expand((*text, token), weight * chance)

    expand((), 1.0)
    texts = sample_texts(model, [[0]] * 4000, max_new_tokens=3, params=params, eos_ids=[EOS], seed=1, batch=4000)
    counts = Counter(map(tuple, texts))
    assert counts.keys() <= law.keys() and len(law) == 15 and min(law.values()) * 4000 > 5
    assert sum((counts[text] - 4000 * chance) ** 2 / (4000 * chance) for text, chance in law.items()) < 55


def test_rows_that_have_ended_leave_the_batch_and_every_token_is_reported() -> None:
    model = tiny_model("llama", vocab=6, seed=3)
    passes: list[int] = []
    reported: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    prompts = [[2, token % 6] for token in range(64)]
    texts = sample_texts(
        model,
        prompts,
        max_new_tokens=40,
        params=SamplingParams(1.0),
        eos_ids=[EOS],
        seed=0,
        on_tokens=reported.append,
    )
    alive = [sum(len(text) > step for text in texts) for step in range(len(passes))]
    assert reported == alive
    assert alive[0] == 64 and 0 < alive[-1] < 20
    assert all(rows * COMPACT_SHARE <= left or rows == left for rows, left in zip(passes, alive, strict=True))


def test_a_long_prompt_beside_a_short_one_is_not_read_token_by_token() -> None:
    model = tiny_model("llama", vocab=6, seed=3)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    params = SamplingParams()
    texts = sample_texts(model, [[0, 2], [4] * 57], max_new_tokens=4, params=params, eos_ids=[EOS], seed=0)
    assert len(passes) == sum(map(len, texts)), "the short text has ended when the long one begins"
    assert texts == [alone(model, prompt, params, 4) for prompt in ([0, 2], [4] * 57)]


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_cache_that_keeps_some_rows_goes_on_with_their_texts(family: str) -> None:
    model = tiny_model(family, vocab=6)
    texts = torch.randint(6, (5, 9), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(9, batch=5)
    model.prefill(texts[:, :6], cache)
    kept = torch.tensor([4, 1])
    cache.keep_rows(kept)
    torch.testing.assert_close(model(texts[kept, 6:], cache, 6), model(texts[kept])[:, 6:], rtol=0, atol=1e-12)


def test_a_model_whose_numbers_are_none_is_refused_with_the_place() -> None:
    model = tiny_model("llama", vocab=6)
    model.layers[1].mlp.up_proj.weight[0] = float("nan")
    with pytest.raises(InputError, match="the MLP of layer 1"):
        sample_texts(model, PROMPTS, max_new_tokens=3, params=SamplingParams(1.0), eos_ids=[], seed=0)


@pytest.mark.parametrize(
    ("prompts", "options", "complaint"),
    [
        ([[]], {}, "a prompt has 0 tokens"),
        ([[0], [0] * 64], {}, "a prompt has 64 tokens: it must have from 1 to 63"),
        ([[6]], {}, "outside 0..5"),
        ([[0, -1]], {}, "outside 0..5"),
        ([[0]], {"max_new_tokens": 0}, "max-new-tokens must be at least 1"),
        ([[0]], {"batch": 0}, "batch must be at least 1"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompts: list[list[int]], options: dict[str, Any], complaint: str) -> None:
    model = tiny_model("llama", vocab=6)
    arguments = {"max_new_tokens": 3, "params": SamplingParams(), "eos_ids": [], "seed": 0} | options
    with pytest.raises(InputError, match=complaint):
        sample_texts(model, prompts, **arguments)


def test_no_prompts_give_no_texts() -> None:
    model = tiny_model("llama")
    assert sample_texts(model, [], max_new_tokens=3, params=SamplingParams(), eos_ids=[], seed=0) == []


# The file.

TEXTS = [
    WrittenText("story", "Tell me of a fox.", "A fox ran.\nIt \u00e4te \u2028 \U0001f98a.", True, 0.8),
    WrittenText("chat", "Hi!", "Hello", False, 1),
    WrittenText("story", "Again.", "The end", True, 0.0),
]


def test_a_file_cut_at_any_byte_goes_on_without_loss_or_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)  # hundreds of them would take seconds
    whole = tmp_path / "whole.jsonl"
    TextFile(whole, len).append(TEXTS)
    data = whole.read_bytes()
    lines = data.splitlines(keepends=True)
    assert [json.loads(line)["response"] for line in lines] == [text.response for text in TEXTS]
    cut = tmp_path / "cut.jsonl"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        file = TextFile(cut, len)
        held = [number for number in range(4) if size >= sum(map(len, lines[:number])) - (number > 0)][-1]
        assert cut.read_bytes() == b"".join(lines[:held])
        assert file.lines == held
        assert file.total_tokens == sum(len(text.response) for text in TEXTS[:held])
        file.append(TEXTS)
        assert cut.read_bytes() == data
        assert file.total_tokens == sum(len(text.response) for text in TEXTS)


def test_responses_that_begin_alike_are_written_once(tmp_path: Path) -> None:
    beginning = "x" * DISTINCT_CHARACTERS
    responses = [beginning + "a", beginning + "b", beginning[1:] + "a", "x", "x"]
    texts = [WrittenText("chat", "Hi!", response, True, 0.8) for response in responses]
    file = TextFile(tmp_path / "texts.jsonl", len)
    file.append(texts[:1])
    file.append(texts)
    assert TextFile(file.path, len).lines == file.lines == 3
    assert [json.loads(line)["response"][-1] for line in file.path.read_text().splitlines()] == ["a", "a", "x"]


def test_a_full_disk_keeps_the_lines_that_fit(tmp_path: Path) -> None:
    whole, full = TextFile(tmp_path / "whole.jsonl", len), TextFile(tmp_path / "full.jsonl", len)
    whole.append(TEXTS)
    lines = whole.path.read_bytes().splitlines(keepends=True)
    full.append(TEXTS[:1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0] + lines[1]) + 9, limits[1]))  # a part of the third fits
    try:
        with pytest.raises(InputError, match="cannot be written: File too large; its whole lines are kept"):
            full.append(TEXTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.path.read_bytes() == lines[0] + lines[1]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"Dear diary", "line 1 is not a text that this command wrote"),
        (b"Dear diary\n", "line 1 is not"),
        (b'{"kind": "poem", "prompt": "", "response": "", "finished": true, "temperature": 1}\n', "line 1 is not"),
        (b'{"kind": "chat", "prompt": "", "response": "", "finished": 1, "temperature": 1}\n', "line 1 is not"),
        (b'{"kind": "chat"}\n{"ki', "line 1 is not"),
        (b"\xff\n", "line 1 is not"),
        (b"[" * 100_000 + b"\n", "line 1 is not"),
        (b"\n", "line 1 is not"),
        (b'{"text": "half', "line 1 is not"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        TextFile(path, len)
    assert path.read_bytes() == content


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template whose turns end with END, a token that it is fond of."""
    folder = write_folder(tmp_path_factory.mktemp("models") / "chat", eos_ids=(VOCAB_SIZE - 1,))
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][-1] *= 4
    save_file(state, folder / "model.safetensors")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def write(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command on the tiny model: its status and what it said on standard error.

    What it babbles is worth learning here: see ``tests/decoding/test_quality.py``.
    """
    monkeypatch.setattr(authors, "worth_learning", lambda text: text)
    monkeypatch.setattr(authors, "MESSAGE_TOKENS", 16)

    def command(*arguments: object) -> tuple[int, str]:
        options = ["--model", folder, "--temperature", 2, "--top-k", 0, "--max-new-tokens", 9, "--batch", 12]
        status = corpus.main([str(argument) for argument in [*options, *arguments]])
        return status, capsys.readouterr().err

    return command


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_writes_both_kinds_until_there_are_tokens_enough(write: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    status, said = write("--tokens", 900, "--out", out)
    assert status == 0
    assert "tokens/s" in said
    rows = rows_of(out)
    assert {row["kind"] for row in rows} == {"story", "chat"}
    assert {row["finished"] for row in rows} == {True, False}
    assert all(list(row) == ["kind", "prompt", "response", "finished", "temperature"] for row in rows)
    assert all(row["response"].strip() and row["prompt"] and row["temperature"] == 2 for row in rows)
    assert len({row["response"][:DISTINCT_CHARACTERS] for row in rows}) == len(rows)
    before = out.read_bytes()
    assert write("--tokens", 900, "--out", out)[0] == 0
    assert out.read_bytes() == before, "there were tokens enough already"


def test_a_run_that_is_interrupted_writes_what_an_uninterrupted_one_writes(
    write: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert write("--tokens", 900, "--out", whole)[0] == 0
    production, sizes = authors.Author.write, []

    def interrupted(self: authors.Author, *arguments: Any) -> list[WrittenText]:
        sizes.append(parts.stat().st_size)
        if len(sizes) in (1, 3, 4, 6):
            raise KeyboardInterrupt
        return production(self, *arguments)

    monkeypatch.setattr(authors.Author, "write", interrupted)
    while (status := write("--tokens", 900, "--out", parts)[0]) == 130:
        pass
    assert status == 0
    assert len(sizes) > 6
    assert parts.read_bytes() == whole.read_bytes()


def test_a_run_killed_while_it_writes_goes_on_with_other_random_numbers(
    write: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seeds = tmp_path / "out.jsonl", []
    production = authors.sample_texts

    def noted(*arguments: Any, seed: int, **more: Any) -> list[list[int]]:
        seeds.append(seed)
        return production(*arguments, seed=seed, **more)

    monkeypatch.setattr(authors, "sample_texts", noted)
    assert write("--tokens", 900, "--out", out, "--kind", "story")[0] == 0
    data = out.read_bytes()
    kept = data[: len(data) * 2 // 5]
    out.write_bytes(kept)
    assert write("--tokens", 900, "--out", out, "--kind", "story")[0] == 0
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    beginnings = [row["response"][:DISTINCT_CHARACTERS] for row in rows_of(out)]
    assert len(set(beginnings)) == len(beginnings)
    assert len(set(seeds)) == len(seeds) > 2


def test_a_model_that_repeats_itself_is_given_up(write: Command, tmp_path: Path) -> None:
    """Greedily there is one message, one response; this one has an end, or none in all of its tokens."""
    status, said = write("--tokens", 10_000, "--out", tmp_path / "out", "--kind", "chat", "--temperature", 0)
    assert status == 2
    assert "the last 256 texts" in said or "the last 264 texts" in said
    assert said.splitlines()[-1].endswith("raise --temperature or --top-k")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", 0], "--tokens must be at least 1, found 0"),
        (["--batch", -1], "--batch must be at least 1, found -1"),
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1, found 0"),
        (["--temperature", "nan"], "temperature must be at least 0"),
        (["--top-k", -1], "top-k must be at least 0"),
        (["--batch", 10**12], "lower --batch"),
        (["--device", "toaster"], "device 'toaster' is not there"),
        (["--model", "/no/model"], "no folder '/no/model'"),
        (["--out", "/no/folder/out.jsonl"], "/no/folder/out.jsonl cannot be written: No such file or directory"),
        (["--out", "/dev/full"], "/dev/full is not a regular file"),
        (["--out", "/"], "/ is not a regular file"),
        (["--out", "x" * 300], "cannot be written: File name too long"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else None,
)
def test_what_the_command_cannot_do_is_refused_in_one_line(
    arguments: list[object], complaint: str, write: Command, tmp_path: Path
) -> None:
    status, said = write("--tokens", 10, "--out", tmp_path / "out.jsonl", *arguments)
    assert status == 2
    assert said.startswith("error: ") and complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "complaint"),
    [(None, "no chat template"), (LINE_AFTER, "no control token"), ("{{ messages[0]['role'] }}", "no control token")],
    ids=["none", "no end of turn", "no message"],
)
def test_only_stories_can_be_had_from_a_template_that_ends_no_turn(
    template: str | None, complaint: str, write: Command, tmp_path: Path
) -> None:
    model = write_folder(tmp_path / "model")
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    out = tmp_path / "out.jsonl"
    status, said = write("--tokens", 10, "--out", out, "--model", model)
    assert (status, said.count("\n")) == (2, 1)
    assert complaint in said and "give --kind story" in said
    assert not out.exists()
    if template != "{{ messages[0]['role'] }}":
        assert write("--tokens", 10, "--out", out, "--model", model, "--kind", "story")[0] == 0
        assert {row["kind"] for row in rows_of(out)} == {"story"}


# Prompts and responses.


def test_what_is_no_text_is_left_out(folder: Path) -> None:
    """Nothing, blanks, a control token in the middle; of a character that was cut off, only that character."""
    tokenizer = Tokenizer(folder)
    author = authors.Author(tiny_model("llama"), tokenizer, SamplingParams(), 9)
    whole = tokenizer.encode("the hen \u00e4")
    assert author.text(whole) == "the hen \u00e4"
    assert author.text(whole[:-1]) == "the hen "
    for tokens in ([], tokenizer.encode(" \n"), whole[-1:], [*whole[:2], VOCAB_SIZE - 1, *whole[2:]]):
        assert author.text(tokens) is None


def test_a_users_turn_is_put_together_as_the_template_does(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    turn = UserTurn.of(tokenizer)
    for text in ("the hen", "a", "Apples", "zebra? 12"):
        ids = [*turn.opening, *tokenizer.encode(text), *turn.closing]
        assert ids == tokenizer.encode_chat([{"role": "user", "content": text}])
    assert turn.closing[0] == VOCAB_SIZE - 1


def test_there_are_thousands_of_stories_and_no_blank_is_left() -> None:
    rng = random.Random(0)
    prompts = {templates.story_prompt(rng) for _ in range(10_000)}
    assert len(prompts) > 5_000
    assert not any("{" in prompt for prompt in prompts)
    assert all(prompt[0].isupper() and prompt[-1] == "." for prompt in prompts)


def test_a_story_begins_with_whom_its_prompt_is_about(write: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert write("--tokens", 300, "--out", out, "--kind", "story")[0] == 0
    for row in rows_of(out):
        subjects = [who for who in templates.WHO if who in row["prompt"]]
        beginnings = [opening.format(who=who) for opening in templates.OPENINGS for who in subjects]
        assert row["response"].startswith(tuple(beginnings))


@pytest.mark.parametrize("refuses", [True, False])
def test_a_narrator_speaks_where_the_template_lets_one(refuses: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    guard = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(guard * refuses + TEMPLATE)
    tokenizer = Tokenizer(folder)
    author = authors.Author(tiny_model("llama"), tokenizer, SamplingParams(), 9)
    for _, prompt, _ in author.stories(3, random.Random(0)):
        assert (authors.NARRATOR in tokenizer.decode(prompt)) == (not refuses)
