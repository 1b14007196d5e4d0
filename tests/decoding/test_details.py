"""The probabilities behind a round: true, and without any say in what is written."""

from typing import Any

import pytest
import torch

from decoding.drafters import Draft, ModelDrafter
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams, distribution
from decoding.show.page import TOP, Recording
from decoding.text import Rules, Text
from model import Decoder, LayerPlan
from tests.laws import speculated, tiny_model

VOCAB, PROMPT, GAMMA = 11, [3, 1, 4, 1, 5], 3
EXIT = LayerPlan.early_exit(3, 2)
PARAMS = [
    SamplingParams(),
    SamplingParams(0.9, top_k=8),
    SamplingParams(1.0, repetition_penalty=1.3),
]


def write(model: Decoder, params: SamplingParams) -> list[tuple[Round, list[dict[str, Any]]]]:
    recording = Recording(params, str)
    rounds = speculated(
        model,
        Text(PROMPT, Rules(24), model),
        lambda model, cache: ModelDrafter(model, cache, EXIT),
        FixedLength(GAMMA),
        params,
        SeededRandomness(1),
        observer=recording.observe,
    )
    return [(round, recording.details) for round in rounds]


@pytest.mark.parametrize("params", PARAMS)
def test_every_number_is_that_of_a_pass_without_cache_or_loop(params: SamplingParams) -> None:
    """p and q of each token, and the lists: of p and q, but of raw probabilities in greedy
    decoding.
    """
    model = tiny_model("llama", vocab=VOCAB)

    text, checked = list(PROMPT), set()
    for round, details in write(model, params):
        assert len(details) == len(round.drafted) + 1
        for at, detail in enumerate(details):
            row = at if at < len(round.drafted) else round.accepted
            prefix = torch.tensor(text + round.drafted[:row])
            own = at == len(round.drafted)
            token = round.emitted[round.accepted] if own else round.drafted[at]
            assert int(detail["text"]) == detail["id"] == token
            assert_numbers(detail, "p", "target_top", model, None, prefix, params)
            if row < len(round.drafted):
                assert_numbers(detail, "q", "draft_top", model, EXIT, prefix, params)
                checked.add("own beside a rejected token" if own else "drafted")
            else:
                assert detail["q"] is None and detail["draft_top"] == []
        text += round.emitted
    assert checked == {"drafted", "own beside a rejected token"}


@torch.inference_mode()
def assert_numbers(
    detail: dict[str, Any],
    number: str,
    top_tokens: str,
    model: Decoder,
    plan: LayerPlan | None,
    prefix: torch.Tensor,
    params: SamplingParams,
) -> None:
    """The number is the token's probability. The list holds the likeliest tokens in order, with
    their probabilities, and the token.
    """
    logits = model(prefix[None], plan=plan)[0, -1:]
    probs = distribution(logits, prefix, params)[0]
    token = detail["id"]
    assert detail[number] == pytest.approx(probs[token].item(), abs=1e-6)
    if params.temperature == 0:
        probs = logits.softmax(-1)[0]
    top = [(int(label), prob) for label, prob in detail[top_tokens]]
    assert [prob for _, prob in top] == pytest.approx(
        [probs[other].item() for other, _ in top], abs=1e-6
    )
    best = [prob for prob in probs.sort(descending=True).values[:TOP].tolist() if prob > 0]
    assert [prob for _, prob in top[: len(best)]] == pytest.approx(best, abs=1e-6)
    assert token in [other for other, _ in top]


def test_the_list_names_the_token_even_where_it_is_impossible_and_survives_broken_numbers() -> None:
    probs = torch.tensor([[0.0, 0.6, 0.0, 0.4, 0.0, 0.0, 0.0]])
    for target, token, wanted in (
        (probs, 3, [("1", 0.6), ("3", 0.4)]),
        (probs, 5, [("1", 0.6), ("3", 0.4), ("5", 0.0)]),
        (torch.full((1, 7), torch.nan), 2, [("2", 0.0)]),
    ):
        recording = Recording(SamplingParams(1.0), str)
        nothing = Draft(torch.empty(0, dtype=int), torch.empty(0, 7))
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
    assert [fate for _, fate in round.verdicts()] == fates
    kept = [token for token, fate in round.verdicts() if fate in ("accepted", "own")]
    assert kept == round.emitted
