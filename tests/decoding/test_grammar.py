"""Texts under a grammar: their law is plain constrained sampling's under every drafter, and the
masks are those of the language, enumerated without the library.
"""

import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from random import Random
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import Tensor

from decoding import drafters, policies, sampling
from decoding.grammar import TITLES, ForcedTokens, Grammar, Vocabulary
from decoding.proof import enumeration, loop_law, plain_law, table_model
from decoding.randomness import KeyedRandomness, SeededRandomness
from decoding.rounds import Round
from decoding.text import Conditions
from model.cache import KVCache
from tests.calls import recorded
from tests.laws import EXACT, TABLE_DRAFTERS, random_tables, text_of
from tests.refusal import refusal

EOS = 4  # of the tokens a, b, ab, c and the empty one
TOKENS = table_model.TEXTS[: EOS + 1]
LONGEST = 10  # bytes of the strings by which a language is enumerated, more than any text here has


def encode(text: str) -> list[int]:
    """The longest token first: "ab" is one token, never two."""
    data, ids = text.encode(), []
    while fitting := [token for token in range(EOS) if data.startswith(TOKENS[token])]:
        ids.append(max(fitting, key=lambda token: len(TOKENS[token])))
        data = data[len(TOKENS[ids[-1]]) :]
    return ids


VOCABULARY = Vocabulary(TOKENS, frozenset({EOS}), encode)
GRAMMARS: dict[str, tuple[str, str]] = {
    "one string": ("regex", "ab"),
    "one byte forced, its token not": ("regex", "a(b|c)"),
    "two ways to write it": ("regex", "(ab|a|b){2}c"),
    "any of two letters": ("regex", "[ab]{3}"),
    "forced, then a choice": ("regex", "abab|abc"),
    "no end": ("regex", "a*"),
    "may end early": ("regex", "(ab)+c?"),
    "long and forced": ("regex", "c(ab){2}c"),
    "short": ("regex", "[abc]{1,2}"),
    "a choice that decides the rest": ("regex", "(a|b)c|abb"),
    "a forced token before a guess": ("regex", "ca(b|c)"),
    "nested": ("lark", 'start: "a" start "b" | "c"'),
}
PARAMS = [
    sampling.SamplingParams(1.0),
    sampling.SamplingParams(0.0),
    sampling.SamplingParams(0.7, top_k=2),
    sampling.SamplingParams(1.0, repetition_penalty=1.4),
    sampling.SamplingParams(1.2, min_p=0.2),
]
STOPS: list[dict[str, Any]] = [
    {},
    {"stop_strings": ("ba", "cc")},
    {"banned": ("bb",), "max_new_tokens": 2},
    {"banned": ("aa", "ca"), "max_new_tokens": 2, "stop_strings": ("c",)},
]
POLICIES: list[Callable[[], policies.Policy]] = [
    lambda: policies.FixedLength(2),
    lambda: policies.FixedLength(3),
    lambda: policies.AdaptiveExit(0.45, 3, step=0.15),
]


@cache
def grammar(name: str) -> Grammar:
    return Grammar(*GRAMMARS[name], VOCABULARY)


def under_grammar(name: str, inner: str) -> Callable[[Any, KVCache], drafters.Drafter]:
    """Forced tokens of the grammar, and elsewhere the drafts of the inner drafter."""
    return lambda model, cache: ForcedTokens(TABLE_DRAFTERS[inner](model, cache), grammar(name)(1))


def table(seed: str) -> table_model.TableModel:
    return random_tables(Random(seed).getrandbits(32), 7, 5)


def request(name: str, number: int = 0) -> plain_law.Request:
    """A request under a grammar, with other parameters and stops for each number."""
    return plain_law.Request(
        params=PARAMS[number % len(PARAMS)],
        eos_ids=frozenset({EOS}),
        constraints=(grammar(name)(1),),
        **{"max_new_tokens": 3} | STOPS[number % len(STOPS)],
    )


@pytest.mark.parametrize("numbers", [range(4), pytest.param(range(4, 64), marks=pytest.mark.prove)])
@pytest.mark.parametrize("drafter", TABLE_DRAFTERS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_law_is_plain_constrained_samplings(
    name: str, drafter: str, numbers: Sequence[int]
) -> None:
    """Its constraint knows the strings of the language, and not the library."""
    for number in numbers:
        asked, model = request(name, number), table(f"{name} {drafter} {number}")
        setup = loop_law.Setup(under_grammar(name, drafter), POLICIES[number % 3])
        known = replace(asked, constraints=(of_language(name),))
        law = enumeration.output_law(partial(loop_law.run_loop, model, asked, setup))
        assert enumeration.total_variation(law, plain_law.plain_law(model, known)) < EXACT


@pytest.mark.parametrize("name", GRAMMARS)
def test_under_the_race_every_drafter_writes_the_plain_text(name: str) -> None:
    for number in range(20):
        asked, model = request(name, number), table(f"{name} {number}")
        setups = [
            loop_law.Setup(under_grammar(name, inner), POLICIES[number % 3])
            for inner in TABLE_DRAFTERS
        ]
        randomness = KeyedRandomness(number)
        texts = {loop_law.run_loop(model, asked, each, randomness, rule="race") for each in setups}
        assert len(texts) == 1


# ---- the language, without the library ----


@cache
def language(name: str) -> frozenset[bytes]:
    """All strings of a grammar of up to LONGEST bytes."""
    kind, source = GRAMMARS[name]
    if kind == "lark":
        return frozenset(b"a" * n + b"c" + b"b" * n for n in range(LONGEST))
    strings = (bytes(each) for n in range(LONGEST + 1) for each in product(b"abc", repeat=n))
    return frozenset(each for each in strings if re.fullmatch(source.encode(), each))


def of_language(name: str) -> Callable[[Sequence[int]], Tensor]:
    """The constraint of a language, by its strings.

    Where all strings go on with the same bytes, these are written in the tokens of the tokenizer,
    as far as no later byte can change them.
    """

    def allowed(tokens: Sequence[int]) -> Tensor:
        written = b"".join(TOKENS[token] for token in tokens[1:])
        rests = {each[len(written) :] for each in language(name) if each.startswith(written)}
        same = min(rests)
        while not all(rest.startswith(same) for rest in rests):
            same = same[:-1]
        unsure = max(
            (
                n
                for n in range(len(same) + 1)
                if any(
                    len(token) > n and token.startswith(same[len(same) - n :]) for token in TOKENS
                )
            ),
        )
        first = encode(same.decode())[:1]
        if first and len(TOKENS[first[0]]) <= len(same) - unsure:
            return torch.arange(EOS + 1) == first[0]
        begins = [any(rest.startswith(token) for rest in rests) for token in TOKENS[:EOS]]
        return torch.tensor([*begins, b"" in rests])

    return allowed


def test_the_masks_are_freed_with_their_text() -> None:
    """At once: a server has many texts, and a mask as many bytes as the vocabulary has tokens."""
    constraint = grammar("no end")(0)
    mask = weakref.ref(constraint([]))
    assert mask() is not None
    del constraint
    assert mask() is None


# ---- forced tokens ----


@pytest.mark.parametrize(
    ("name", "drafter", "first"),
    [
        *(("long and forced", drafter, [3, 2, 2, 3, EOS]) for drafter in TABLE_DRAFTERS),
        ("a forced token before a guess", "none", [3, 0]),  # "ca" is forced, and a or ab written
    ],
)
def test_forced_tokens_are_drafted_without_a_model_and_accepted(
    name: str, drafter: str, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = recorded(monkeypatch, table_model.TableModel, "__call__", lambda *given: given[4:])
    rounds: list[Round] = []
    policy = policies.AdaptiveExit(0.5, 6)
    setup = loop_law.Setup(under_grammar(name, drafter), lambda: policy)
    loop_law.run_loop(
        table(name),
        replace(request(name), max_new_tokens=8),
        setup,
        SeededRandomness(0),
        on_round=rounds.append,
    )
    assert rounds[0].drafted[: len(first)] == first and rounds[0].accepted
    assert {*plans} == {()}, "the target alone was called"
    assert (policy.rate, policy.threshold) == (0.0, 0.5), "nothing is learned of a model's drafts"


# ---- what a user may give ----


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "the JSON schema: EOF while parsing an object"),
        ("json_schema", '{"const": NaN}', "the JSON schema: expected value at line 1 column 11"),
        ("json_schema", '{"enum": [1e400]}', "the JSON schema: number out of range"),
        ("json_schema", "[]", "the JSON schema: Expecting object schema"),
        ("json_schema", '{"type": "nope"}', "the JSON schema: Invalid type: nope"),
        ("json_schema", '{"enum": []}', "the JSON schema: Unsatisfiable schema"),
        ("json_schema", '{"not": {}}', 'the JSON schema: Unimplemented keys: ["not"]'),
        (
            "json_schema",
            '{"uniqueItems": true}',
            'the JSON schema: Unimplemented keys: ["uniqueItems"]',
        ),
        ("json_schema", '{"const": "\\ud800"}', "the JSON schema: unexpected end of hex escape"),
        ("json_schema", '{"$ref": "#"}', "the JSON schema: no text satisfies it"),
        (
            "json_schema",
            '{"$ref": "#/$defs/x"}',
            "the JSON schema: Pointer '/$defs/x' does not exist",
        ),
        *((kind, "a\udcff", f"the {title}: ") for kind, title in TITLES.items()),
        ("regex", "(", "the regular expression: unclosed group"),
        ("regex", "a\\", "the regular expression: it ends in a backslash that escapes nothing"),
        ("regex", "(?=a)b", "the regular expression: look-around"),
        ("regex", "", "the regular expression: only the empty text satisfies it"),
        (
            "regex",
            "x",
            "the regular expression: it forces a byte that no token of the model writes",
        ),
        ("regex", "x|y", "the regular expression: no text satisfies it"),
        ("lark", "start: foo", 'the Lark grammar: at 1(8): unknown name: "foo"'),
        ("lark", "", "the Lark grammar: Empty grammar"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_line(kind: Any, source: str, message: str) -> None:
    assert refusal(Grammar, kind, source, VOCABULARY).startswith(message)


@pytest.mark.parametrize("ids", [frozenset(), frozenset({len(TOKENS)})], ids=str)
def test_a_grammar_needs_an_end_of_text_token(ids: frozenset[int]) -> None:
    assert "end-of-text" in refusal(Vocabulary, TOKENS, ids, encode)


def test_where_the_library_fails_nothing_is_forced() -> None:
    """After "a" it forces a byte that no token writes."""
    made = Grammar("regex", "(a|b)cxa", VOCABULARY)
    text = text_of([0], Conditions(9, constraints=(made(0),)), vocab=EOS + 1)
    assert ForcedTokens(drafters.NoDraft(), made(0)).forced(text, 4) == []


def test_a_tokenizer_that_changes_bytes_changes_no_mask() -> None:
    """One that normalises, for example, or puts a space before a text."""
    wrong = Grammar("regex", "abab|abc", Vocabulary(TOKENS, frozenset({EOS}), lambda text: [3]))
    assert wrong(0)([]).tolist() == grammar("forced, then a choice")(0)([]).tolist()


def test_an_end_of_text_token_with_bytes_neither_ends_a_whole_text_nor_a_part() -> None:
    """Some checkpoints end texts at a token that is a word elsewhere."""
    made = Grammar("regex", "a(b|c)", Vocabulary(TOKENS, frozenset({1, EOS}), encode))
    for text, allowed in (([], [0, 2]), ([0], [3]), ([0, 3], [EOS])):
        assert made(0)(text).nonzero()[:, 0].tolist() == allowed


def test_an_error_of_a_matcher_reaches_no_other_branch() -> None:
    """A matcher never leaves an error: another one serves, unless it fails after this text too."""
    constraint = replace(grammar("any of two letters"))(0)
    failing = Mock(wraps=constraint.matcher)
    failing.is_error.return_value = True
    failing.get_error.return_value = "too many states\n<state>"
    constraint.matcher = failing
    assert constraint([0]).tolist() == grammar("any of two letters")(0)([0]).tolist()
    constraint.matcher = failing
    constraint.grammar.__dict__["pristine"] = Mock(deep_copy=lambda: failing)
    assert not constraint([0, 0]).any() and "too many states" in constraint.trouble_after([0, 0])


def test_the_time_of_masks_is_that_of_computing_and_not_of_waiting_for_a_core() -> None:
    constraint = replace(grammar("no end"), seconds=1.5)(0)
    constraint.matcher = Mock(wraps=constraint.matcher)
    constraint.matcher.compute_bitmask.side_effect = lambda: time.sleep(0.05) or DEFAULT
    constraint([])
    assert 0 < constraint.seconds < 0.05
    assert "took more than 0 s: simplify it" in refusal(replace, constraint.grammar, seconds=0.0)
