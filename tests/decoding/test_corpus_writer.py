"""Corpus writer: each row of a batch is what the production loop would write alone; the file; the command."""

from __future__ import annotations

import json
import random
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
from decoding.corpus.author import user_turn
from decoding.corpus.text_file import DISTINCT_CHARACTERS, TextFile, WrittenText, read_texts
from decoding.policies import FixedLength
from decoding.proof.judge import Setup, run_loop
from decoding.proof.plain_law import Request
from decoding.randomness import Place
from decoding.run.batch import sample_texts
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
    """The production loop's continuation of one prompt, greedily."""
    request = Request(tuple(prompt), params, max_new_tokens, frozenset([EOS]))
    tokens, _ = run_loop(model, request, Setup(no_draft, lambda: FixedLength(0)), First())
    return list(tokens)


class First:
    """Randomness that always takes the likeliest token: all that a one-hot distribution needs."""

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
        assert sample_texts(model, PROMPTS, max_new_tokens=20, params=params, eos_ids=[EOS], seed=0) == expected
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
    assert sample_texts(model, PROMPTS, max_new_tokens=12, params=params, eos_ids=[EOS], seed=7) == expected
    assert sample_texts(model, PROMPTS[:1], max_new_tokens=12, params=params, eos_ids=[EOS], seed=7) == expected[:1]
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
        for token, weight_of_token in enumerate(distribution(model(tokens)[0, -1:], tokens[0], params)[0].tolist()):
            expand((*text, token), weight * weight_of_token)

    expand((), 1.0)
    texts = sample_texts(model, [[0]] * 4000, max_new_tokens=3, params=params, eos_ids=[EOS], seed=1)
    counts = Counter(map(tuple, texts))
    assert counts.keys() <= law.keys() and len(law) == 15 and min(law.values()) * 4000 > 5
    assert sum((counts[text] - 4000 * each) ** 2 / (4000 * each) for text, each in law.items()) < 55


def test_a_model_with_non_finite_logits_is_refused() -> None:
    model = tiny_model("llama", vocab=6)
    model.layers[1].mlp.up_proj.weight[0] = float("nan")
    with pytest.raises(InputError, match="stop being finite"):
        sample_texts(model, PROMPTS, max_new_tokens=3, params=SamplingParams(1.0), eos_ids=[], seed=0)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="a prompt has 64 tokens: the model's context ends after 64"):
        sample_texts(
            tiny_model("llama"), [[0], [0] * 64], max_new_tokens=3, params=SamplingParams(), eos_ids=[], seed=0
        )


def test_no_prompts_give_no_texts() -> None:
    model = tiny_model("llama")
    assert sample_texts(model, [], max_new_tokens=3, params=SamplingParams(), eos_ids=[], seed=0) == []


# The file.

TEXTS = [
    WrittenText("story", "Tell me of a fox.", "A fox ran.\nIt \u00e4te \u2028 \U0001f98a."),
    WrittenText("chat", "Hi!", "Hello"),
    WrittenText("story", "Again.", "The end"),
]


def test_a_file_is_continued_without_loss_or_repetition(tmp_path: Path) -> None:
    file = TextFile(tmp_path / "texts.jsonl", len)
    file.add(TEXTS[:2])
    before = file.path.read_bytes()
    again = TextFile(file.path, len)
    assert file.path.read_bytes() == before and again.tokens == {"story": len(TEXTS[0].response), "chat": 5}
    again.add(TEXTS)
    assert read_texts(file.path) == TEXTS and again.tokens.total() == sum(len(text.response) for text in TEXTS)


def test_responses_that_begin_alike_are_written_once(tmp_path: Path) -> None:
    beginning = "x" * DISTINCT_CHARACTERS
    responses = [beginning + "a", beginning + "b", beginning[1:] + "a", "x", "x"]
    file = TextFile(tmp_path / "texts.jsonl", len)
    file.add(WrittenText("chat", "Hi!", response) for response in responses)
    assert [text.response[-1] for text in read_texts(file.path)] == ["a", "a", "x"]


def test_a_full_disk_keeps_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TextFile(tmp_path / "texts.jsonl", len)
    file.add(TEXTS[:1])

    def fills_up(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fills_up)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        file.add(TEXTS)
    assert read_texts(file.path) == TEXTS[:1] and list(tmp_path.iterdir()) == [file.path]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"Dear diary", "line 1 is not a text that this command wrote"),
        (b"Dear diary\n", "line 1 is not"),
        (b'{"kind": "poem", "prompt": "", "response": ""}\n', "line 1 is not"),
        (b'{"kind": "chat", "prompt": "", "response": 3}\n', "line 1 is not"),
        (b'{"kind": "chat", "prompt": "", "response": ""}\n{"ki', "line 2 is not"),
        (b"\xff\n", "line 1 is not"),
        (b"\n", "line 1 is not"),
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
    """Run the command on the tiny model: its status and its standard error.

    Its babble is worth learning here: see ``tests/decoding/test_quality.py``.
    """
    monkeypatch.setattr(authors, "worth_learning", lambda text, finished: text)
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
    assert "of 900 tokens" in said
    rows = rows_of(out)
    assert {row["kind"] for row in rows} == {"story", "chat"}
    assert all(list(row) == ["kind", "prompt", "response"] for row in rows)
    assert all(row["response"].strip() and row["prompt"] for row in rows)
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
        (["--device", "toaster"], "device 'toaster' is not there"),
        (["--model", "/no/model"], "no folder '/no/model'"),
        (["--out", "/dev/full"], "/dev/full"),
        (["--out", "/"], "give the name of a file"),
        (["--judge-again", "/no/file.jsonl"], "/no/file.jsonl"),
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
    "template", [None, LINE_AFTER, "{{ messages[0]['role'] }}"], ids=["none", "no end of turn", "no message"]
)
def test_only_stories_can_be_had_from_a_template_that_ends_no_turn(
    template: str | None, write: Command, tmp_path: Path
) -> None:
    model = write_folder(tmp_path / "model")
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    out = tmp_path / "out.jsonl"
    status, said = write("--tokens", 10, "--out", out, "--model", model)
    assert (status, said.count("\n")) == (2, 1)
    assert "no control token ends a user's turn in this model's chat template, if any: give --kind story" in said
    assert not out.exists()
    if template != "{{ messages[0]['role'] }}":
        assert write("--tokens", 10, "--out", out, "--model", model, "--kind", "story")[0] == 0
        assert {row["kind"] for row in rows_of(out)} == {"story"}


# Prompts and responses.


def test_tokens_without_text_are_left_out(folder: Path) -> None:
    """Nothing, blanks, a control token in the middle; of a character that was cut off, only that character."""
    tokenizer = Tokenizer(folder)
    author = authors.Author(tiny_model("llama"), tokenizer, SamplingParams(), 9)
    whole = tokenizer.encode("the hen \u00e4")
    assert author.text(whole) == "the hen \u00e4"
    assert author.text(whole[:-1]) == "the hen "
    for tokens in ([], tokenizer.encode(" \n"), whole[-1:], [*whole[:2], VOCAB_SIZE - 1, *whole[2:]]):
        assert author.text(tokens) == ""


def test_a_users_turn_is_put_together_as_the_template_does(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    opening, closing = user_turn(tokenizer)
    for text in ("the hen", "a", "Apples", "zebra? 12"):
        ids = [*opening, *tokenizer.encode(text), *closing]
        assert ids == tokenizer.encode_chat([{"role": "user", "content": text}])
    assert closing[0] == VOCAB_SIZE - 1


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
