"""Transcript, stop strings, banned words and streaming agree with naive searches of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.banned import BannedWords
from decoding.rounds import Round, Statistics
from decoding.show.streaming import TextStream
from decoding.stopping import StopRules
from decoding.text import Patterns, Transcript
from model import InputError

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"",
    b"ba",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    "🦊".encode()[:2],
    b"\xa6\x8a",
]
tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
words = st.lists(st.sampled_from(["a", "ab", "aba", "bb", "é", "bé", "🦊"]), max_size=3)


def piece(token: int) -> bytes:
    return PIECES[token]


@given(tokens=tokens, length=st.integers(0, 12), more=tokens)
@settings(derandomize=True)
def test_a_transcript_taken_back_is_the_transcript_never_written(
    tokens: list[int], length: int, more: list[int]
) -> None:
    text = Transcript(tokens, piece)
    text.truncate(length)
    for token in more:
        text.append(token)
    fresh = Transcript(tokens[:length] + more, piece)
    assert (text.tokens, text.data, text.ends) == (fresh.tokens, fresh.data, fresh.ends)


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=10), words=words)
@settings(derandomize=True, max_examples=300)
def test_a_pattern_is_found_at_its_first_end_within_the_new_bytes(tokens: list[int], words: list[str]) -> None:
    data = bytearray(b"".join(map(piece, tokens)))
    new = len(piece(tokens[-1]))
    expected = None
    for end in range(len(data) - new + 1, len(data) + 1):
        ending = [w for w in map(str.encode, words) if data[:end].endswith(w)]
        if ending:
            expected = end - max(map(len, ending))
            break
    assert Patterns(words).completed(data, new) == expected


@given(tokens=tokens, words=words)
@settings(derandomize=True, max_examples=300)
def test_what_is_pending_is_the_longest_end_that_begins_a_pattern(tokens: list[int], words: list[str]) -> None:
    data = bytearray(b"".join(map(piece, tokens)))
    starts = [
        begin
        for begin in range(len(data))
        if any(word.startswith(data[begin:]) and len(word) > len(data) - begin for word in map(str.encode, words))
    ]
    assert Patterns(words).pending(data) == min(starts, default=len(data))


def one_token_rounds(tokens: list[int], prompt: list[int], stop: StopRules) -> list[Round]:
    """Rounds of one token each, up to the first stop."""
    text, rounds = Transcript(prompt, piece), []
    for token in tokens:
        text.append(token)
        rounds.append(Round(len(text.tokens) - 1, [], 0, [token], finish=stop.check(text, 1000)))
        if rounds[-1].finish:
            break
    return rounds


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    words=words,
    eos=st.sets(st.integers(0, 9), max_size=2),
    group=st.integers(1, 4),
)
@settings(derandomize=True, max_examples=300)
def test_streamed_text_is_the_text_cut_before_the_stop_whatever_the_rounds(
    prompt: list[int], tokens: list[int], words: list[str], eos: set[int], group: int
) -> None:
    stop = StopRules(len(tokens), frozenset(eos), words)
    rounds = one_token_rounds(tokens, prompt, stop)
    written = [round.emitted[0] for round in rounds]
    whole = b"".join(map(piece, written))
    if rounds[-1].finish == "stop":
        whole = whole[: min(whole.find(word) for word in map(str.encode, words) if word in whole)]
    stream, shown = TextStream(prompt, piece, stop), ""
    for at in range(0, len(written), group):
        finish = rounds[-1].finish if at + group >= len(written) else None
        shown += stream.push(Round(0, [], 0, written[at : at + group], finish=finish))
        assert whole.decode(errors="replace").startswith(shown), "something was shown that is not in the text"
    assert shown == stream.text == whole.decode(errors="replace")
    assert stream.tokens == written


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream([0], piece, StopRules(9))
    assert [stream.push(Round(0, [], 0, [token])) for token in (6, 7, 8)] == ["", "é", ""]
    assert stream.push(Round(0, [], 0, [9], finish="length")) == "🦊"


def test_an_interrupted_stream_shows_what_it_held_back() -> None:
    stream = TextStream([0], piece, StopRules(9, stop_strings=["ba"]))
    assert stream.push(Round(0, [], 0, [0, 1])) == "a"
    assert stream.flush() == "b"


def test_a_stop_string_begun_in_the_prompt_is_not_a_stop() -> None:
    stop, text = StopRules(9, stop_strings=["ab"]), Transcript([0], piece)
    text.append(1)
    assert stop.check(text, 100) is None


def test_end_of_text_comes_before_stop_string_and_budget_at_the_same_token() -> None:
    text = Transcript([1], piece)
    text.append(0)
    assert StopRules(1, frozenset({0}), ["a"]).check(text, 2) == "eos"
    assert StopRules(1, frozenset(), ["a"]).check(text, 2) == "stop"
    assert StopRules(1).check(text, 2) == "length"
    assert StopRules(2).check(text, 2) == "length", "the context is full"
    assert StopRules(2).check(text, 3) is None


def test_a_banned_word_takes_back_the_token_in_which_it_began() -> None:
    banned, text = BannedWords(["bb"], 10), Transcript([0], piece)
    for token in (2, 1):  # a|ab|b
        text.append(token)
    assert banned.retract(text) == 2
    assert text.tokens == [0]
    assert banned.forbidden == {1: [2]}
    allowed = banned.allowed([0])
    assert allowed is not None
    assert allowed.tolist() == [token != 2 for token in range(10)]
    assert banned.allowed([0, 1]) is None


def test_a_banned_word_begun_in_the_prompt_forbids_the_first_generated_token() -> None:
    banned, text = BannedWords(["aab"], 10), Transcript([0, 0], piece)
    text.append(1)
    assert banned.retract(text) == 1
    assert text.tokens == [0, 0]
    assert banned.forbidden == {2: [1]}


def test_what_is_forbidden_adds_up_at_a_prefix_and_ends_when_a_rollback_passes_it() -> None:
    banned, text = BannedWords(["ab", "aé", "bba"], 10), Transcript([1], piece)
    for token in (1, 0, 1):  # b|b a b: "bba" began in the prompt
        text.append(token)
        if banned.retract(text):
            break
    assert banned.forbidden == {1: [1]}
    for token in (0, 5):  # b|a é
        text.append(token)
    assert banned.retract(text) == 2
    assert banned.forbidden == {1: [1, 0]}
    banned.forbidden[3] = [4]
    for token in (3, 0, 1):  # an empty token, then a b
        text.append(token)
    assert banned.retract(text) == 2
    assert banned.forbidden == {1: [1, 0], 2: [0]}, "position 3 was passed"


def test_streaming_holds_back_the_token_in_which_a_banned_word_may_begin() -> None:
    banned = BannedWords(["bb"], 10)
    stream = TextStream([0], piece, StopRules(9), banned)
    assert stream.push(Round(0, [], 0, [2])) == ""  # "ab" may yet be taken back whole
    assert stream.push(Round(0, [], 0, [0])) == "aba"
    assert stream.push(Round(0, [], 0, [1, 1], retracted=2)) == ""
    assert stream.tokens == [2, 0]
    assert TextStream([1], piece, StopRules(9), banned).push(Round(0, [], 0, [3])) == ""


def test_statistics_count_output_only() -> None:
    statistics = Statistics()
    assert statistics.acceptance_rate is None
    assert statistics.tokens_per_round == 0
    for round in (
        Round(5, [1, 1, 1], 2, [1, 1, 4]),
        Round(8, [], 0, [3]),
        Round(9, [1, 1], 2, [1, 1, 2], retracted=2),
        Round(10, [7, 7, 7], 3, [7], finish="eos"),  # two more were accepted after the end: they do not exist
    ):
        statistics.add(round)
    assert (statistics.rounds, statistics.tokens) == (4, 3 + 1 + 1 + 1)
    assert (statistics.drafted, statistics.accepted) == (8, 2 + 2 + 1)
    assert statistics.acceptance_rate == 5 / 8
    assert statistics.tokens_per_round == 6 / 4
    assert statistics.histogram == [0, 1, 2]


@pytest.mark.parametrize(
    "make", [lambda: StopRules(0), lambda: StopRules(1, stop_strings=[""]), lambda: BannedWords([""], 3)]
)
def test_an_empty_string_or_budget_is_refused(make: object) -> None:
    with pytest.raises(InputError):
        make()
