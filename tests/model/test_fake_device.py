"""Whole texts on the fake device: they are the CPU's, and the host reads once per round."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from decoding.drafters import Draft
from decoding.policies import FixedLength
from decoding.randomness import KeyedRandomness, Randomness, SeededRandomness
from decoding.rounds import Round
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Rules, Text
from decoding.verify import Rule
from model import LAUNCHERS, Decoder
from model.fast import gpu, graphs
from model.fast.gpu import StaticDecoder
from model.fast.graphs import Launcher
from tests import fake_device
from tests.laws import REAL_DRAFTERS, REAL_POLICIES, begun, tiny_model

VOCAB, PROMPT = 19, [1, 2, 3, 4]
static = partial(StaticDecoder, compiled=False)
RULES = Rules(12)
BANNED = Rules(24, banned=["ab", "ca"])


def randomness(device: str, coupling: str) -> Randomness:
    """Randomness of a rule on a device; the same numbers on each."""
    if coupling == "race":
        return KeyedRandomness(3, device)
    return SeededRandomness(3) if device == "cpu" else fake_device.FakeDeviceRandomness(3)


def write(
    device: str,
    family: str,
    drafter: str,
    policy: str = "fixed",
    coupling: str = "ratio",
    params: SamplingParams = SamplingParams(0.9, top_k=15, top_p=0.95),
    rules: Rules = RULES,
    prepare: Callable[[Decoder], Any] = static,
) -> tuple[list[int], list[Round], Counter[str]]:
    """A text with its rounds, and the counts of the device."""
    model = prepare(tiny_model(family, vocab=VOCAB).to(device))
    cache, drafts = begun(model, drafter, PROMPT)
    text = Text(PROMPT, rules, model, lambda token: b"abcd"[token % 4 : token % 4 + 1])
    drawn = randomness(device, coupling), Coupling(coupling, 3).verify
    fake_device.counts.clear()
    rounds = list(speculate(model, cache, text, drafts, REAL_POLICIES[policy](), params, *drawn))
    if isinstance(model, StaticDecoder):
        assert model.trouble is None and model.why_rows_vary is None
    return text.tokens, rounds, fake_device.counts.copy()


def check(family: str, drafter: str, **how: Any) -> tuple[list[Round], Counter[str]]:
    """Rounds and counts of a text on the fake device, which is the CPU's text."""
    expected, *_ = write("cpu", family, drafter, **how)
    found, rounds, counts = write(fake_device.NAME, family, drafter, **how)
    assert found == expected
    return rounds, counts


@pytest.mark.parametrize("drafter", REAL_DRAFTERS)
@pytest.mark.parametrize(("family", "coupling"), [("llama", "ratio"), ("gemma2", "race")])
def test_a_text_is_the_cpus_and_the_host_reads_once_per_round(
    family: str, drafter: str, coupling: str
) -> None:
    """Uploads are the new tokens of the text, drafts by lookup, and the keys of a race."""
    policy = "best length" if drafter == "best of" else "fixed"
    rounds, counts = check(family, drafter, policy=policy, coupling=coupling)
    looked_up = drafter in ("lookup", "best of") and sum(bool(round.drafted) for round in rounds)
    raced = coupling == "race" and len(rounds) + sum(len(round.drafted) for round in rounds)
    assert counts["read"] == len(rounds) and counts["upload"] <= len(rounds) + looked_up + raced


@pytest.mark.parametrize("policy", ["adaptive", "gated"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_policy_that_looks_at_each_drafted_token_reads_once_for_each(
    family: str, policy: str
) -> None:
    """The target's confidence is read together with the verdict."""
    rounds, counts = check(family, "lowbit", policy=policy)
    looked_at = sum(len(round.drafted) for round in rounds) if policy == "adaptive" else 0
    assert counts["read"] - looked_at == len(rounds) == counts["upload"]


@pytest.mark.parametrize("drafter", ["exit", "none"])
def test_a_ban_costs_a_read_only_where_a_word_was_retracted(drafter: str) -> None:
    """By a draft, in the next round: it must stop where no token is allowed."""
    rounds, counts = check("llama", drafter, rules=BANNED)
    retracted = sum(bool(round.retracted) for round in rounds)
    assert retracted and counts["read"] <= len(rounds) + (retracted if drafter == "exit" else 0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.8, repetition_penalty=1.3),
        SamplingParams(1.0, min_p=0.05),
    ],
    ids=["greedy", "penalty", "min-p"],
)
@pytest.mark.parametrize(
    ("family", "prepare"),
    [("llama", static), ("gemma2", lambda model: model)],
    ids=["prepared", "readable"],
)
def test_no_kind_of_sampling_reads_more_whether_the_model_is_prepared_or_not(
    family: str, prepare: Callable[[Decoder], Any], params: SamplingParams
) -> None:
    rounds, counts = check(family, "exit", params=params, prepare=prepare)
    assert counts["read"] == len(rounds) == counts["upload"]


@pytest.mark.parametrize(("coupling", "most"), [("race", 20), ("ratio", 34)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.9),
        SamplingParams(0.9, top_k=9, top_p=0.95, min_p=0.01),
    ],
    ids=["greedy", "temperature", "all filters"],
)
def test_recorded_sampling_leaves_few_operators_outside_of_graphs(
    coupling: str, most: int, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round launches at most 20 beside its draft (34 under the ratio rule, whose parts are
    launched one by one), a drafted token 8; one read per round; the text is the CPU's.
    """
    device = torch.device(fake_device.NAME, 0)
    monkeypatch.setattr(graphs, "compile_function", lambda function: function)
    launcher = Launcher(fake_device.record)
    monkeypatch.setitem(LAUNCHERS, device, launcher)
    monkeypatch.setattr(gpu, "recorder_of", lambda device: fake_device.record)
    model = static(tiny_model("llama", vocab=VOCAB).to(device))
    model.captures = True
    texts = {}
    for drafter in ("none", "exit"):
        cache, drafts = begun(model, drafter, PROMPT)
        per_draft: list[tuple[int, int]] = []
        monkeypatch.setattr(drafts, "propose", counted(drafts.propose, per_draft))
        for _ in range(2):  # the first records graphs
            text = Text(PROMPT, RULES, model)
            drawn = randomness(fake_device.NAME, coupling), Coupling(coupling, 3).verify
            per_draft.clear()
            fake_device.counts.clear()
            rounds = list(speculate(model, cache, text, drafts, FixedLength(3), params, *drawn))
        counts = fake_device.counts.copy()
        texts[drafter] = text.tokens
        verified = counts["kernel"] - sum(kernels for kernels, _ in per_draft)
        assert counts["read"] == len(rounds) and verified <= most * len(rounds)
        if drafter == "exit":
            # besides: the draft's tokens and probabilities as one tensor each
            assert all(kernels <= 8 * drafted + 4 for kernels, drafted in per_draft)
            assert max(drafted for _, drafted in per_draft) == 3
    assert model.trouble is None and all(launcher.graphs.values())
    expected, *_ = write("cpu", "llama", "exit", coupling=coupling, params=params)
    assert texts["exit"] == expected
    if coupling == "race":
        assert texts["exit"] == texts["none"]


def counted(propose: Callable[..., Draft], into: list[tuple[int, int]]) -> Callable[..., Draft]:
    """``propose`` that notes the operators of each draft, and its tokens."""

    def noted(*arguments: Any) -> Draft:
        before = fake_device.counts["kernel"]
        draft = propose(*arguments)
        into.append((fake_device.counts["kernel"] - before, len(draft.tokens)))
        return draft

    return noted


def test_the_device_refuses_to_mix_tensors_and_counts_uploads_and_reads() -> None:
    here, there = torch.ones(3), torch.ones(3, device=fake_device.NAME)
    fake_device.counts.clear()
    for mix in (lambda: there + here, lambda: there[torch.tensor([1])]):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    assert fake_device.counts["upload"] == fake_device.counts["read"] == 0
    assert torch.equal((there + here.to(fake_device.NAME)).cpu(), 2 * here)
    there[:2].copy_(here[:2])
    assert (fake_device.counts["upload"], fake_device.counts["read"]) == (2, 1)
    assert there.sum().item() == 3 and there.tolist() == [1, 1, 1] and bool(there[0] > 0)
    assert fake_device.counts["read"] == 4
