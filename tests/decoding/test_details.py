"""The probabilities behind a round: true, and without any say in what is written."""

from typing import Any

import pytest
import torch

from decoding.drafters import BestOf, Draft, ModelDrafter, PromptLookup
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, distribution
from decoding.show.page import TOP, Recording
from decoding.speculate import speculate
from decoding.text import Rules, Text
from model import Decoder, LayerPlan
from tests.laws import tiny_model

VOCAB, PROMPT, GAMMA = 11, [3, 1, 4, 1, 5], 3
EXIT = LayerPlan.early_exit(3, 2)
PARAMS = [
    SamplingParams(),
    SamplingParams(0.9, top_k=8),
    SamplingParams(1.0, repetition_penalty=1.3),
]


def write(model: Decoder, params: SamplingParams) -> list[tuple[Round, list[dict[str, Any]]]]:
    cache = model.new_cache(model.max_positions)
    with torch.inference_mode():
        model.prefill(torch.tensor([PROMPT[:-1]]), cache)
    text, drafter, recording = (
        Text(PROMPT, Rules(24), model),
        ModelDrafter(model, cache, EXIT),
        Recording(params, str),
    )
    rest = (drafter, FixedLength(GAMMA), params, SeededRandomness(1))
    rounds = speculate(model, cache, text, *rest, observer=recording.observe)
    return [(round, recording.details) for round in rounds]


@pytest.mark.parametrize("params", PARAMS)
def test_every_number_is_that_of_a_pass_without_cache_or_loop(params: SamplingParams) -> None:
    """p and q of each token, and the lists: of p and q, but of raw probabilities in greedy
    decoding.
    """
    model = tiny_model("llama", vocab=VOCAB)
    greedy = params.temperature == 0
    text, checked = list(PROMPT), set()
    for round, details in write(model, params):
        assert len(details) == len(round.drafted) + 1
        for at, detail in enumerate(details):
            row = at if at < len(round.drafted) else round.accepted
            prefix = torch.tensor(text + round.drafted[:row])
            shown = {}
            for side, plan in (("target", None), ("draft", EXIT)):
                with torch.inference_mode():
                    logits = model(prefix[None], plan=plan)[0, -1:]
                probs = distribution(logits, prefix, params)[0]
                shown[side] = (
                    probs[detail["id"]].item(),
                    (logits.softmax(-1)[0] if greedy else probs),
                )
            assert (
                int(detail["text"])
                == detail["id"]
                == (round.drafted[at] if at < len(round.drafted) else round.emitted[round.accepted])
            )
            assert detail["p"] == pytest.approx(shown["target"][0], abs=1e-6)
            assert_lists(detail["target_top"], shown["target"][1], detail["id"])
            if row < len(round.drafted):
                assert detail["q"] == pytest.approx(shown["draft"][0], abs=1e-6)
                assert_lists(detail["draft_top"], shown["draft"][1], detail["id"])
                checked.add(
                    "own beside a rejected token" if at == len(round.drafted) else "drafted"
                )
            else:
                assert detail["q"] is None and detail["draft_top"] == []
                checked.add("bonus")
        text += round.emitted
    assert checked >= {"drafted", "own beside a rejected token"}


def assert_lists(labelled: list[tuple[str, float]], probs: torch.Tensor, token: int) -> None:
    """The list holds the likeliest tokens in order, with their probabilities, and the token asked
    about.
    """
    top = [(int(label), prob) for label, prob in labelled]
    assert [prob for _, prob in top] == pytest.approx(
        [probs[other].item() for other, _ in top], abs=1e-6
    )
    best = [prob for prob in probs.sort(descending=True).values[:TOP].tolist() if prob > 0]
    assert [prob for _, prob in top[: len(best)]] == pytest.approx(best, abs=1e-6)
    assert token in [other for other, _ in top]


def test_the_list_names_the_token_even_where_it_is_impossible_and_survives_broken_numbers() -> None:
    probs, nothing = (
        torch.tensor([[0.0, 0.6, 0.0, 0.4, 0.0, 0.0, 0.0]]),
        Draft(torch.empty(0, dtype=int), torch.empty(0, 7)),
    )
    for target, token, wanted in (
        (probs, 3, [("1", 0.6), ("3", 0.4)]),
        (probs, 5, [("1", 0.6), ("3", 0.4), ("5", 0.0)]),
        (torch.full((1, 7), torch.nan), 2, [("2", 0.0)]),
    ):
        recording = Recording(SamplingParams(1.0), str)
        recording.observe(nothing, target, target, 0, torch.tensor(token))
        assert recording.details[0]["target_top"] == wanted


@pytest.mark.parametrize(
    ("round", "fates"),
    [
        (Round(5, [7, 8, 9], 3, [7, 8, 9, 1]), ["accepted", "accepted", "accepted", "own"]),
        (Round(5, [7, 8, 9], 1, [7, 2]), ["accepted", "rejected", "discarded", "own"]),
        (Round(5, [], 0, [4]), ["own"]),
        (Round(5, [7, 8, 9], 3, [7], finish="eos"), ["accepted", "discarded", "discarded"]),
        (Round(5, [7, 8, 9], 1, [7], retracted=[7]), ["accepted", "rejected", "discarded"]),
    ],
    ids=[
        "all accepted",
        "one rejected",
        "no draft",
        "ended inside the draft",
        "taken back inside the draft",
    ],
)
def test_every_token_of_a_round_has_its_verdict(round: Round, fates: list[str]) -> None:
    verdicts = round.verdicts()
    assert [fate for _, fate in verdicts] == fates
    assert [token for token, fate in verdicts if fate in ("accepted", "own")] == round.emitted


def test_a_recording_names_the_drafter_of_each_round() -> None:
    """Of several, and of one that draws nothing."""
    model = tiny_model("llama", vocab=VOCAB)
    lookup = PromptLookup(VOCAB)
    for name, make in {
        "model": lambda cache: BestOf({"model": ModelDrafter(model, cache, EXIT)}),
        "lookup": lambda cache: BestOf({"lookup": lookup}),
    }.items():
        cache = model.new_cache(model.max_positions)
        recording = Recording(SamplingParams(), str)
        text = Text(PROMPT, Rules(8), model)
        with torch.inference_mode():
            model.prefill(torch.tensor([PROMPT[:-1]]), cache)
        rest = (make(cache), FixedLength(GAMMA), SamplingParams(), SeededRandomness(1))
        rounds = speculate(model, cache, text, *rest, observer=recording.observe)
        told = [recording.add(round, 1.0) for round in rounds]
        assert {each["drafter"] for each in told if each["drafted"]} == {name}
        assert {each["drafter"] for each in told if not each["drafted"]} <= {"", name}
