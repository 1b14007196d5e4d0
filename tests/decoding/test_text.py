"""The text and its conditions: stop strings, bans and streaming agree with naive searches of the
whole text.
"""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.characters import TextStream
from decoding.rounds import Round, Statistics
from decoding.text import Conditions
from tests.laws import text_of
from tests.refusal import refusal

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
words = st.lists(st.sampled_from(["a", "ab", "aba", "bb", "é", "bé", "🦊"]), max_size=3)


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    wanted=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    stops=words,
    banned=words,
    eos=st.sets(st.integers(0, 9), max_size=2),
    groups=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
@settings(derandomize=True, max_examples=300)
def test_shown_is_the_text_of_the_tokens_cut_at_the_stop_and_nothing_shown_is_taken_back(
    prompt: list[int],
    wanted: list[int],
    stops: list[str],
    banned: list[str],
    eos: set[int],
    groups: list[int],
) -> None:
    """For any bans, stops, rounds and tokenisation. A token forbidden where it is wanted is
    replaced by another.
    """
    conditions = Conditions(len(wanted), frozenset(eos), stops, banned)
    text = text_of(prompt, conditions, PIECES.__getitem__, vocab=len(PIECES))
    stream, shown, left = TextStream(text), "", list(wanted)
    for count in groups * 3:
        round = left[:count] or [3]
        for at, token in enumerate(round):
            allowed = text.allowed_after(round[:at])
            if allowed is not None and not allowed[token]:
                round = [*round[:at], int(allowed.long().argmax())] if allowed.any() else round[:at]
                break
        if not round:
            return  # every token is forbidden: the loop ends here
        left = left[len(text.extend(round)[0]) :]
        shown += stream.pull()
        assert text.written.startswith(shown), (
            "something was shown that is not in the text any more"
        )
        if text.finish:
            break
    whole = b"".join(map(PIECES.__getitem__, text.generated))
    if text.finish == "stop":
        whole = whole[: min(whole.find(word) for word in map(str.encode, stops) if word in whole)]
    if text.finish:
        assert shown == text.written == whole.decode(errors="replace")


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        *(
            (partial(Conditions, 9, **{condition: strings}), "")
            for condition in ("stop_strings", "banned")
            for strings in ("a", [""], ["\udcff"])
        ),
        *((partial(text_of, [0] * n, positions=4), f"has {n} tokens") for n in (0, 4, 5)),
    ],
)
def test_a_string_that_no_text_can_hold_and_a_prompt_that_is_empty_or_fills_the_context_are_refused(
    refused: Callable[[], object], said: str
) -> None:
    assert said in refusal(refused)


def test_strings_cannot_be_found_in_tokens_without_bytes() -> None:
    assert "need `token_bytes`" in refusal(text_of, [0], Conditions(9, banned=["a"]))


def test_streaming_holds_back_the_token_in_which_a_banned_word_may_begin() -> None:
    """An interrupted stream shows it."""
    text = text_of([0], Conditions(9, banned=["bb"]), PIECES.__getitem__)
    stream = TextStream(text)
    for tokens, shown in (([2], ""), ([0], "aba"), ([1, 1], ""), ([1], "")):
        text.extend(tokens)
        assert stream.pull() == shown, "ab may yet be retracted whole"
    assert (text.generated, stream.pull(at_end=True)) == ([2, 0, 1], "b")


def test_where_two_bans_overlap_nothing_is_shown_that_the_first_may_yet_take_back() -> None:
    """After "island of" has retracted "island", "village" completes "small village", which retracts
    "small" too.
    """
    words = [b"the ", b"small ", b"island ", b"of ", b"village "]
    text = text_of([0], Conditions(9, banned=["island of", "small village"]), words.__getitem__)
    stream, shown = TextStream(text), ""
    for token, retracted in ((1, []), (2, []), (3, [2, 3]), (4, [1, 4]), (3, [])):
        assert text.extend([token])[1] == retracted
        shown += stream.pull()
    assert (shown, text.tokens) == ("of ", [0, 3])


def test_statistics_count_output_only() -> None:
    statistics = Statistics()
    assert statistics.acceptance_rate is None and statistics.tokens_per_round == 0
    for round in (
        Round(5, [1, 1, 1], 2, [1, 1, 4]),
        Round(8, [], 0, [3]),
        Round(9, [1, 1], 2, [1, 1, 2], retracted=[1, 2]),
        # two more were accepted after the end: they do not exist
        Round(10, [7, 7, 7], 3, [7], finish="eos"),
    ):
        statistics.add(round)
    expected = {
        "rounds": 4,
        "tokens": 3 + 1 + 1 + 1,
        "drafted": 8,
        "accepted": 2 + 2 + 1,
        "acceptance_rate": 5 / 8,
        "tokens_per_round": 6 / 4,
        "histogram": [0, 1, 2],
        "acceptance_by_position": [3 / 3, 2 / 3, 0 / 2],
    }
    assert {name: getattr(statistics, name) for name in expected} == expected
