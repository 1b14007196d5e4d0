"""Search: acceptance of a pass, sums of costs, the optimum that it finds, its command and pictures,
and wrong input.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
import torch

from app.common.files import write_text
from app.options import Options
from app.plan_file import read_plan
from decoding.sampling import SamplingParams, distribution
from model.decoder import Decoder
from model.plan import FULL, LOW_BITS, LayerPlan
from search import __main__ as command
from search import costs, study
from search.acceptance import ACCEPTED, Calibration, accepted_by_race, accepted_by_ratio
from search.costs import CostModel, measure_costs, parts_of
from search.study import (
    SAMPLERS,
    WAYS,
    Importance,
    Prediction,
    best_so_far,
    early_exits,
    finished,
    first_plans,
    measure_importance,
    open_study,
    parameters,
    plan_of,
    space_of,
)
from search.texts import Continuation, split_prompts
from tests.calls import interrupted, recorded, status_of
from tests.configs import FAMILIES
from tests.folders import LLAMA, write_folder
from tests.laws import prefilled, tiny_model
from tests.refusal import refusal
from weights.load import model_fingerprint

BITS = (*LOW_BITS, FULL)
# of a head, an attention, an MLP: in proportion to their bits
PARTS = {
    f"{bits}-bit {kind}": cost * bits / FULL
    for kind, cost in (("head", 0.1), ("attn", 0.1), ("mlp", 0.12))
    for bits in BITS
}
COSTS = CostModel(PARTS, [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4])
# Optuna's, which the command line switches off
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

DRAWN = torch.randint(0, 7, (2, 15), generator=torch.Generator().manual_seed(0)).tolist()
WRITTEN = [Continuation(tuple(row[:3]), tuple(row[3:])) for row in DRAWN]


def session_of(model: Decoder, **options: Any) -> Any:
    return SimpleNamespace(model=model, options=Options(**options))


def toy(plan: LayerPlan) -> Prediction:
    """A speed-up that prefers plans without MLPs, without a model."""
    return Prediction(float(sum(plan.attention) - sum(plan.mlp)), 4, 0.5)


@torch.inference_mode()
def by_single_steps(
    model: Decoder, plan: LayerPlan, params: SamplingParams, coupling: str
) -> float:
    """Mean acceptance by a target pass without a cache, and a draft step per token."""
    rule = ACCEPTED[coupling]
    found = []
    for text in WRITTEN:
        tokens = [*text.prompt, *text.written]
        for at in range(len(text.prompt), len(tokens)):
            before = torch.tensor(tokens[:at])
            p = distribution(model(before[None])[0, -1:], before, params)
            cache = prefilled(model, tokens[:at])
            q = distribution(model(before[None, -1:], cache, at - 1, plan)[0], before, params)
            found.append(rule(p, q, torch.tensor([[tokens[at]]])).item())
    return sum(found) / len(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("coupling", "temperature", "top_k"), [("race", 0.0, 0), ("race", 0.8, 3), ("ratio", 1.2, 0)]
)
def test_one_pass_measures_the_acceptance_of_every_first_draft_step(
    family: str, coupling: str, temperature: float, top_k: int
) -> None:
    """Under any plan, across the edges of windows, for every rule and parameter."""
    model = tiny_model(family, vocab=7)
    session = session_of(model, temperature=temperature, top_k=top_k, coupling=coupling)
    calibration = Calibration(session, WRITTEN)
    for plan in (
        LayerPlan.early_exit(3, 1),
        LayerPlan.skipping(3, [0, 2], [1]),
        LayerPlan((4, FULL, 0), (8, 0, 4), head=8, window=2),
        LayerPlan.full(3),
        replace(LayerPlan.full(3), window=3),
    ):
        expected = by_single_steps(model, plan, calibration.params, coupling)
        assert calibration.acceptance(plan) == pytest.approx(expected, abs=1e-9)


def test_the_mean_acceptance_of_a_rule_is_the_published_one() -> None:
    """Over the target's tokens: Σ min(p, q), and of the race Σ_x 1 / Σ_y max(p_y/p_x, q_y/q_x)."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.1, 0.9, 0.0], dtype=torch.float64)
    rows = p.expand(3, 3), q.expand(3, 3), torch.arange(3)[:, None]
    by_ratio, by_race = ((p @ rule(*rows)).item() for rule in (accepted_by_ratio, accepted_by_race))
    assert by_ratio == pytest.approx(torch.minimum(p, q).sum().item())
    # over the drafted tokens, of which the last is none
    shares = [1 / torch.maximum(p / p[x], q / q[x]).sum() for x in (0, 1)]
    assert by_race == pytest.approx(sum(shares).item())
    p, q = torch.tensor([[[0.0, 1.0]], [[1e-42, 1.0]]])  # a number below the normal ones
    assert accepted_by_race(p, q, torch.tensor([[0]])) == 1


def test_the_cost_of_a_step_is_the_sum_of_its_parts() -> None:
    """Attentions under a window have costs of their own."""
    plan = LayerPlan((4, 8, 0), (0, FULL, 4), head=8)
    others = {"16-bit mlp": 1, "4-bit mlp": 1, "8-bit head": 1}
    assert parts_of(plan) == {"4-bit attn": 1, "8-bit attn": 1, **others}
    assert COSTS.step(plan) == pytest.approx(0.5 * 0.1 + (0.25 + 0.5) * 0.1 + (1 + 0.25) * 0.12)
    assert parts_of(replace(plan, window=7)) == {
        "4-bit attn of 7": 1,
        "8-bit attn of 7": 1,
        **others,
    }
    assert "was not measured: '4-bit attn of 7'" in refusal(COSTS.step, replace(plan, window=7))


@pytest.mark.parametrize(("rate", "step"), [(0.8, 0.2), (0.3, 0.4), (0.99, 0.01)])
def test_the_best_length_has_the_largest_quotient_of_tokens_over_the_cost(
    rate: float, step: float
) -> None:
    """(1 - α^(γ+1)) / (1 - α) over γ·c + v: 3.36 tokens over 2.1 at α .8 and γ 4 with c .2."""
    costs = CostModel({}, [1.0, 1.1, 1.2, 1.25, 1.3])
    quotients = [
        (1 - rate ** (length + 1)) / (1 - rate) / (length * step + costs.verify[length])
        for length in range(1, 5)
    ]
    assert costs.best(rate, step) == (
        pytest.approx(max(quotients)),
        1 + quotients.index(max(quotients)),
    )


def test_costs_are_the_differences_of_timed_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of which a plain round takes ten ticks and each verified row one; of a draft step
    the head takes two, an MLP one, and an attention one for each of the 30 keys that it sees.
    """

    def ticks(session: object, cache: object, prompt: object, drafter: Any, gamma: int) -> float:
        if not hasattr(drafter, "plan"):
            return 10 + gamma
        plan = drafter.plan
        seen = (plan.window or 30) * len(plan.attention_layers)
        return 10 + gamma + gamma * (2 + sum(each > 0 for each in plan.mlp) + seen)

    monkeypatch.setattr(costs, "seconds_of_round", ticks)
    session = command.Session(Options(model=str(write_folder(tmp_path, LLAMA)), device="cpu"))
    found = measure_costs(session, [[1, 2, 3, 4]], [4, FULL], [None, 7])
    assert found.verify == [(10 + length) / 10 for length in range(9)]
    parts = {
        f"{bits}-bit {kind}": cost
        for kind, cost in (("head", 0.2), ("mlp", 0.1), ("attn", 3.0))
        for bits in (4, FULL)
    }
    assert found.parts == pytest.approx(
        parts | dict.fromkeys(("4-bit attn of 7", "16-bit attn of 7"), 0.7)
    )


def test_the_search_finds_the_optimum_that_exhaustive_enumeration_finds() -> None:
    """All 64 plans of a 3-layer model with or without each sublayer, against half as many trials of
    the search.
    """
    calibration = Calibration(session_of(tiny_model("llama", vocab=7, layers=3)), WRITTEN)

    def predict(plan: LayerPlan) -> Prediction:
        rate = calibration.acceptance(plan)
        return Prediction(*COSTS.best(rate, COSTS.step(plan)), rate)

    space = space_of(3, [0], [])
    first = first_plans(measure_importance(3, calibration.acceptance), space)
    found = best_so_far(predict, space, first, 32, SAMPLERS["tpe"](seed=0))
    assert found[-1] == max(
        predict(LayerPlan(flags[:3], flags[3:])).speedup
        for flags in itertools.product([FULL, 0], repeat=6)
    )


def test_every_choice_of_the_space_is_one_of_its_plans() -> None:
    space = space_of(1, (0, *LOW_BITS), [7])
    every = [dict(zip(space, each, strict=True)) for each in itertools.product(*space.values())]
    assert [parameters(plan_of(each)) for each in every] == every


def test_starts_are_distinct_plans_of_every_kind_in_turn() -> None:
    """Exits, the least important sublayers skipped, all sublayers in each number of bits and under
    each window, and the first two in few bits.
    """
    full = LayerPlan.full(4)
    lost = Importance([0.5, 0.5, 0.01, 0.5], [0.5, 0.02, 0.5, 0.5])
    plans = first_plans(lost, space_of(4, (0, *LOW_BITS), [7]))
    fewest = {"bits": min(LOW_BITS), "head": max(LOW_BITS)}
    exit, thinned = LayerPlan.early_exit(4, 1), LayerPlan.skipping(4, [2], [])
    assert plans[:2] == [exit, thinned]
    assert plans[2:5] == [each.in_bits(**fewest) for each in (full, exit, thinned)]
    assert {LayerPlan.skipping(4, [2], [1]), *early_exits(4)} <= {*plans}
    assert {replace(each, window=7) for each in (full, full.in_bits(**fewest))} <= {*plans}
    assert len(set(plans)) == len(plans) and full not in plans


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_first_plans_come_first_and_a_seed_proposes_the_same_plans_after_them(
    sampler: str,
) -> None:
    first = [LayerPlan((0,), (4,), head=4, window=7), LayerPlan.full(1)]
    runs = []
    for _ in range(2):
        predict = Mock(side_effect=toy)
        curve = best_so_far(predict, space_of(1, [0, 4], [7]), first, 40, SAMPLERS[sampler](seed=3))
        assert curve == sorted(curve) and len(curve) == 40
        runs.append([call.args[0] for call in predict.call_args_list])
    tried, again = runs
    assert tried == again and tried[:2] == first


def test_the_neighbour_of_a_plan_that_comes_twice_has_other_bits_in_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = [LayerPlan.full(2), LayerPlan.early_exit(2, 1)]
    monkeypatch.setattr(study, "predictions_of", lambda _: {plan: toy(plan) for plan in first})
    noted = recorded(monkeypatch, optuna.Study, "enqueue_trial", lambda _, given, **__: given)
    best_so_far(toy, space_of(2, [0, 4], []), first, 2, SAMPLERS["random"](seed=0))
    assert [len(noted[at].items() - noted[at + 2].items()) for at in (0, 1)] == [1, 1]


def test_every_prompt_is_searched_on_or_held_out() -> None:
    """Where it fits: a prompt leaves room for a token in the context."""
    session: Any = SimpleNamespace(encode=lambda prompt: [*prompt], context=4)
    for count in range(3, 12):
        prompts = [f"{number:3}" for number in range(count)]
        searched, held_out = split_prompts(session, ["long", *prompts])
        assert sorted(map("".join, searched + held_out)) == prompts and len(held_out) == count // 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two layers, and prompts."""
    folder = write_folder(tmp_path / "my model", {**LLAMA, "num_hidden_layers": 2})
    (tmp_path / "prompts.txt").write_text("the hen\nan inn\nthe tin\na hen\n", encoding="utf-8")
    return folder


def arguments(folder: Path, *more: object) -> list[str]:
    return [
        *("--model", str(folder), "--device", "cpu", "--max-new-tokens", "16"),
        *("--calibration", str(folder.parent / "prompts.txt")),
        *map(str, more),
    ]


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "measure_costs", lambda *how: COSTS)


@pytest.mark.usefixtures("known_costs")
def test_the_command_writes_a_plan_and_pictures_compares_samplers_and_goes_on_with_its_study(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, plots = tmp_path / "plan.json", tmp_path / "plots"
    more = ["--trials", 6, "--plots", plots, "--compare-samplers", 2]
    assert command.main(arguments(folder, "--out", out, *more)) == 0
    written = json.loads(out.read_text())
    assert written["model"] == model_fingerprint(folder)
    gamma = read_plan(out, 2, folder).gamma
    assert gamma == written["gamma"] and (gamma > 0) == (written["measured_speedup"] > 1)
    assert {path.stem for path in plots.iterdir()} == {"front", "importance", "samplers"}
    said = " ".join(capfd.readouterr().err.split())
    assert "with 6 trials no sampler is asked" in said
    assert all(f"{name}: " in said for name in WAYS)
    assert "importance by layer, attention " in said
    assert (
        f"python generate.py \"Your prompt\" --model '{folder}' --draft skip --plan {out}" in said
    ) == (gamma > 0)
    predicted = recorded(monkeypatch, CostModel, "step", lambda _, plan: plan)
    by_importance = recorded(
        monkeypatch, Calibration, "acceptance", lambda of, _: bool(of.model.importance)
    )
    assert command.main(arguments(folder, "--out", out, "--trials", 8)) == 0
    kept = open_study(out.with_suffix(".journal"), written["study"], "tpe", 0)
    assert len(finished(kept)) == 8, "six trials were in the journal"
    chosen = [
        plan_of(trial.system_attrs.get("fixed_params", trial.params)) for trial in kept.trials
    ]
    assert len({*chosen}) == len(chosen), "no first plan was queued twice"
    assert len({*predicted}) == len(predicted) and {*predicted}.isdisjoint(chosen[:6])
    assert kept.user_attrs.keys() == {"costs", "importance"} and {*by_importance} == {True}


@pytest.mark.usefixtures("known_costs")
def test_a_plan_that_the_search_did_not_make_stays_and_its_own_is_only_replaced_by_a_faster_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CONFIRMED", 0)
    shipped = folder / "plan.json"
    shipped.write_text('{"attn": [1], "mlp": []}')
    assert command.main(arguments(folder, "--trials", 3)) == 0
    assert shipped.read_text() == '{"attn": [1], "mlp": []}'
    [beside] = folder.glob("plan-*.json")
    assert f"{shipped} is not of this search and stays" in capfd.readouterr().err
    own = json.loads(beside.read_text()) | {"attn": [], "mlp": [], "bits": 4, "head_bits": 8}
    for path in (beside, shipped):
        path.write_text(json.dumps(own))
        before = read_plan(path, 2).plan
        confirmed = recorded(monkeypatch, command, "confirm", lambda *given: {*given[2]})
        assert command.main(arguments(folder, "--trials", 3)) == 0
        assert before in confirmed[0]
    edited = json.dumps(own | {"bits": 8, "mlp": [0]})  # a plan that the study has not tried
    shipped.write_text(edited)
    assert command.main(arguments(folder, "--trials", 3)) == 0
    assert shipped.read_text() == edited


@pytest.mark.parametrize("bits", [(0, 4), (4,)])
@pytest.mark.usefixtures("known_costs")
def test_the_best_early_exit_is_confirmed_whichever_plans_were_tried(
    bits: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nothing may be skipped."""
    low = LayerPlan.full(2).in_bits(4, head=4)
    monkeypatch.setattr(command, "first_plans", lambda *_: [low])
    confirmed = recorded(monkeypatch, command, "confirm", lambda *given: {*given[2]})
    assert command.main(arguments(folder, "--trials", 1, "--bits", *bits)) == 0
    assert confirmed == [{low} | ({LayerPlan.early_exit(2, 1)} if 0 in bits else set())]


@pytest.mark.parametrize("damaged", ["{", "{}", "[]", '{"parts": {}, "verify": []}'])
def test_costs_are_measured_once_for_all_studies_of_a_name(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a damaged file are measured again."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    write_text(tmp_path / "costs/a study.json", damaged)
    measured = iter([COSTS])
    monkeypatch.setattr(costs, "measure_costs", lambda *how: next(measured))
    found = [costs.kept_costs("a study", None, [], [], []) for _ in range(2)]
    assert found == [COSTS] * 2


@pytest.mark.usefixtures("known_costs")
def test_costs_that_cannot_be_kept_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", "/dev/null")
    assert costs.kept_costs("a study", None, [], [], []) == COSTS
    assert "[the costs are not kept" in capsys.readouterr().err


def test_a_context_too_short_to_time_drafts_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {**LLAMA, "max_position_embeddings": 45})
    session = command.Session(Options(model=str(folder), device="cpu"))
    said = refusal(measure_costs, session, [[1, 2, 3, 4]], [FULL], [None])
    assert "has a context of 45 tokens: a search needs at least 46" in said


@pytest.mark.parametrize(("context", "windows"), [(20, [None]), (80, [None, 7])])
def test_a_plan_may_have_a_window_where_prompts_are_long(
    context: int, windows: list[int | None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt has the documents' tokens before the request's."""
    monkeypatch.setattr(command, "LONG", 60)
    monkeypatch.setattr(command, "WINDOWS", (7,))
    seen = recorded(monkeypatch, command, "optimise", lambda study, _, space, *__: (study, space))
    assert command.main(arguments(folder, "--trials", 3, "--context", context)) == 0
    [(study, space)] = seen
    monkeypatch.setattr(command, "WINDOWS", (9,))  # begins another study
    assert command.main(arguments(folder, "--trials", 4, "--context", context)) == 0
    assert space["window"] == windows
    assert ("16-bit attn of 7" in study.user_attrs["costs"]["parts"]) == (7 in windows)


@pytest.mark.usefixtures("known_costs")
def test_after_ctrl_c_the_best_plan_found_is_run_and_turned_off_where_it_does_not_pay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    confirm = command.confirm

    def half_as_fast(*given: object) -> object:
        return [result._replace(speedup=0.5) for result in confirm(*given)]

    interrupted(monkeypatch, CostModel, "best", 6)
    monkeypatch.setattr(command, "confirm", half_as_fast)
    out = tmp_path / "plan.json"
    assert command.main(arguments(folder, "--out", out, "--trials", 100)) == 130
    written = json.loads(out.read_text())
    assert written["measured_speedup"] == 0.5 and read_plan(out, 2, folder).gamma == 0
    trials = open_study(out.with_suffix(".journal"), written["study"], "tpe", 0).trials
    lost = [trial.params for trial in trials if trial.state.name == "FAIL"]
    waiting = [trial for trial in trials if trial.state.name == "WAITING"]
    assert lost == [trial.system_attrs["fixed_params"] for trial in waiting[-1:]]
    said = " ".join(capfd.readouterr().err.split())
    assert "no plan beats plain decoding" in said and "the same command continues" in said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--trials", 0], "--trials: must be at least 1, found 0"),
        (["--seed", 2**31], f"--seed: must be from 0 to {2**31 - 1}, found {2**31}"),
        (["--out", "/nowhere/plan.json"], "/nowhere/plan.json cannot be written"),
        (["--plots", "/dev/null/x"], "/dev/null/x cannot be read or written"),
        (["--calibration", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["--max-new-tokens", 10], "at least 32 tokens after its prompts in all"),
        (["--context", 250], "at least 3 prompts that fit the model's context"),
        (["--context", 10**6], "--context 1000000: the documents have"),
        (["--calibration", "alike.txt"], "a search needs at least 3 prompts"),
        (["--temperature", -1], "temperature must be at least 0"),
        (["--out", "text.journal"], "text.journal: the trials are kept there: name a .json"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--out", "text.json"], "text.journal is not a search's journal"),
        (["--out", "json.json"], "json.journal is not a search's journal"),
    ],
)
@pytest.mark.usefixtures("known_costs")
def test_bad_input_is_refused_in_one_line(
    options: list[object],
    complaint: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("alike.txt").write_text("Once upon a time\n" * 3)
    Path("text.journal").write_text("not a journal\nat all\n")
    Path("json.journal").write_text('{"op_code": 99}\n')
    assert status_of(command.main, arguments(folder, *options)) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[")]
    assert len(said) == 1 and said[0].startswith("error: ") and complaint in said[0]
