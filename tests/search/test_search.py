"""Search: the optimum that it finds, its journal, confirmation, its picture, and wrong input."""

import functools
import itertools
import json
import operator
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from app.chooser import Setting
from app.plan_file import DraftPlan, read_plan
from app.writer import Drafting
from decoding.policies import AdaptiveExit, FixedLength
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Rule
from model import FULL, LOW_BITS, Decoder, LayerPlan
from search import __main__ as command
from search.acceptance import Calibration
from search.confirm import confirm, is_exit, plans_to_confirm
from search.costs import CostTable, SublayerCosts, measure_sublayers
from search.prediction import Prediction, plot_plans, predict_plan
from search.study import (
    NAME,
    SAMPLERS,
    finished,
    first_plans,
    importances,
    open_study,
    optimise,
    parameters,
    plan_of,
    predictions_of,
    space_of,
)
from search.texts import Continuation, plain_texts, split_texts
from tests.calls import status_of
from tests.folders import LLAMA, VOCAB_SIZE, byte_tokenizer, write_folder
from tests.laws import tiny_model
from tests.pictures import faults
from tests.refusal import refusal
from weights.load import model_fingerprint
from weights.tokenizer import Tokenizer

BITS = (*LOW_BITS, FULL)
# of a head, an attention, an MLP: in proportion to their bits
PARTS = {
    f"{kind} {bits}": cost * bits / FULL
    for kind, cost in (("head", 0.1), ("attn", 0.1), ("mlp", 0.12))
    for bits in BITS
}
VERIFY = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4)
COSTS = SublayerCosts(PARTS, 0.02, VERIFY, first=0.01, first_in_low_bits=0.15)
GREEDY = SamplingParams()
IDENTITY = {"model": "a", "bits": [0]}
SPACE = space_of(4, (0, *LOW_BITS))
# Optuna's, which the command line switches off
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


DRAWN = torch.randint(0, 7, (2, 15), generator=torch.Generator().manual_seed(0)).tolist()
WRITTEN = [Continuation(tuple(row[:3]), tuple(row[3:])) for row in DRAWN]


def in_memory(sampler: str = "tpe", first: Sequence[LayerPlan] = ()) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[sampler](seed=0))
    for plan in first:
        study.enqueue_trial(parameters(plan))
    return study


def toy(plan: LayerPlan) -> Prediction:
    """A speed-up that prefers one plan, without a model."""
    wanted = LayerPlan.skipping(plan.num_layers, [0], [0, plan.num_layers - 1])
    equal = map(operator.eq, plan.attention + plan.mlp, wanted.attention + wanted.mlp)
    return Prediction(sum(equal) / 4, 4, 0.0, 0.5, 0.6)


def setting_of(model: Decoder) -> Setting:
    return Setting(Path(), model, byte_tokenizer(), GREEDY, model.max_positions)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_parameters_and_plan_are_inverse() -> None:
    for bits in itertools.product([FULL, *LOW_BITS, 0], repeat=4):
        plan = LayerPlan(bits[:2], bits[2:], head=bits[0] or LOW_BITS[0])
        assert plan_of(parameters(plan)) == plan


def test_a_space_offers_every_sublayer_its_bits_and_the_head_those_that_are_not_0() -> None:
    for bits, offered in (([8], [FULL, 8]), ([0, 8], [FULL, 8, 0])):
        sublayers = {"attn 0": offered, "mlp 0": offered}
        assert space_of(1, bits) == {**sublayers, "head": [FULL, 8]}
    assert len(SPACE) == 9


def test_sublayer_costs_add_up() -> None:
    draft = 0.5 * 0.1 + (0.25 + 0.5) * 0.1 + (1 + 0.25) * 0.12
    table = COSTS.table(LayerPlan((4, 8, 0), (0, FULL, 4), head=8))
    assert (table.draft, table.verify) == (pytest.approx(draft), COSTS.verify)


def test_the_first_step_of_a_plan_costs_more_where_it_reads_low_bit_copies() -> None:
    early = LayerPlan.early_exit(4, 2)
    for plan, first in ((early, 0.01), (early.in_bits(8, FULL), 0.15), (early.in_bits(4), 0.15)):
        assert COSTS.table(plan).first == first


def test_sublayer_costs_are_solved_from_the_costs_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(setting: Setting, prompts: object, drafts: Sequence[Drafting]) -> object:
        reading = [draft.new_policy().reads_draft_confidence for draft in drafts]
        assert reading == [False] * (len(drafts) - 1) + [True]
        *tables, last = [COSTS.table(draft.plan) for draft in drafts]
        confident = replace(last, draft=last.draft + COSTS.confidence)
        return [
            CostTable(0.0, COSTS.verify),
            *tables,
            confident,
        ]

    monkeypatch.setattr("search.costs.measure_costs", known)
    setting = setting_of(tiny_model("llama", vocab=7, layers=4))
    for bits in (BITS, [FULL]):
        found = measure_sublayers(setting, WRITTEN, bits)
        parts = {name: cost for name, cost in PARTS.items() if int(name.split()[1]) in bits}
        assert found.parts == pytest.approx(parts)
        assert found.confidence == pytest.approx(COSTS.confidence)
        assert found.verify == pytest.approx(COSTS.verify)
        assert found.first == COSTS.first
        assert found.first_in_low_bits == (COSTS.first_in_low_bits if bits == BITS else 0)


def test_the_search_finds_the_optimum_that_exhaustive_enumeration_finds() -> None:
    """All 64 plans of a 3-layer model with or without each sublayer, against half as many trials of
    the search.
    """
    calibration = Calibration(setting_of(tiny_model("llama", vocab=7, layers=3)), WRITTEN)
    predict_once = functools.cache(functools.partial(predict_plan, calibration, COSTS))
    space = {**space_of(3, [0]), "head": [FULL]}
    plans = [LayerPlan(flags[:3], flags[3:]) for flags in itertools.product([FULL, 0], repeat=6)]
    study = in_memory(first=first_plans(importances(calibration), space))
    optimise(study, predict_once, space, 32)
    best = max(predict_once(plan).speedup for plan in plans)
    assert next(iter(predictions_of(study).values())).speedup == best


def test_a_plan_that_was_tried_is_not_evaluated_again() -> None:
    study, evaluate = in_memory("random"), Mock(side_effect=toy)
    optimise(study, evaluate, space_of(1, [0, 4]), 40)  # one layer has 18 such plans
    assert evaluate.call_count == len(predictions_of(study)) <= 18 and len(finished(study)) == 40


def test_starts_are_distinct_plans_and_skip_the_least_important_sublayers_first() -> None:
    lost = {name: 0.5 for name in SPACE if name != "head"} | {"attn 2": 0.01, "mlp 1": 0.02}
    plans, low = first_plans(lost, SPACE), sorted(LOW_BITS)
    full, most = LayerPlan.full(4), low[-1]
    thinned = [LayerPlan.skipping(4, [2], []), LayerPlan.skipping(4, [2], [1])]
    first = [full.in_bits(bits, head=most) for bits in low]
    first += [plan.in_bits(low[0], head=most) for plan in thinned]
    assert plans[: len(first)] == first
    assert [plan for plan in plans if not plan.has_low_bits][:2] == thinned
    exits = {LayerPlan.early_exit(4, layer) for layer in (1, 2, 3)}
    assert exits | {plan.in_bits(low[0], head=most) for plan in exits} <= set(plans)
    assert {plan for plan in plans if is_exit(plan)} == exits
    assert len(set(plans)) == len(plans) and full not in plans
    # a model of one layer has some, too
    assert first_plans({"attn 0": 0.1, "mlp 0": 0.1}, space_of(1, [0]))
    for bits in ([0], [8, 4]):
        used = [
            {*plan.attention, *plan.mlp, plan.head} for plan in first_plans(lost, space_of(4, bits))
        ]
        assert used and set().union(*used) <= {*bits, FULL}, "none but those that may be tried"


def test_predicted_acceptance_is_measured_acceptance_on_held_out_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.costs.PATIENCE", 0.0)
    model = tiny_model("llama", vocab=VOCAB_SIZE, layers=4)
    setting = Setting(tmp_path, model, Tokenizer(write_folder(tmp_path)), GREEDY, 64)
    coupling = Coupling("race", 0)
    held_out = plain_texts(setting, ["the", "a hen"], 20, coupling)
    assert all(len(text.written) + text.unused == 20 for text in held_out)
    chosen = {LayerPlan.early_exit(4, 2): (3, 0.0), LayerPlan.skipping(4, [1], [2]): (5, 0.0)}
    plans = [DraftPlan(plan, *policy) for plan, policy in chosen.items()]
    results = confirm(setting, held_out, plans, Rules(20, setting.tokenizer.eos_ids), coupling)
    assert {found.plan: (found.gamma, found.threshold) for found, _ in results} == chosen
    first, second = (row for _, row in results)
    assert first["speed-up"] >= second["speed-up"] > 0
    for row in (first, second):
        assert row["accepted"] == pytest.approx(row["acceptance predicted"], abs=1e-9)


def test_the_best_plans_are_judged_on_other_texts_beside_the_best_early_exit() -> None:
    """Values of the search are not used again: they may be luck on its texts."""
    calibration = Calibration(setting_of(tiny_model("llama", vocab=7, layers=4)), WRITTEN)
    plans = first_plans({name: 0.5 for name in SPACE if name != "head"}, SPACE)
    lucky = {plan: Prediction(9.0 - at, 1, 0.0, 1.0, 1.0) for at, plan in enumerate(plans)}
    found = {chosen.plan: chosen for chosen in plans_to_confirm(calibration, COSTS, lucky)}
    again = {plan: predict_plan(calibration, COSTS, plan) for plan in plans}
    best = sorted(plans, key=lambda plan: -again[plan].speedup)
    assert [*found][:3] == best[:3] and len(found) <= 4
    assert next(plan for plan in best if is_exit(plan)) in found
    for plan, chosen in found.items():
        for name in ("gamma", "threshold", "kept_share"):
            assert getattr(chosen, name) == getattr(again[plan], name)


def test_the_picture_of_a_search_is_in_order_and_shows_the_bits_of_the_plans() -> None:
    """However few were tried: the mean bits of a plan are the colour of its dot."""
    plans = [LayerPlan.full(6), LayerPlan.full(6).in_bits(4), LayerPlan.early_exit(6, 3)]
    plans.append(LayerPlan((0, 4, 8, FULL, 4, 4), (4, 0, 8, FULL, 8, 0), head=8))
    found = {plan: Prediction(1.3, 2, 0.0, 0.5, 0.9 - at / 5) for at, plan in enumerate(plans)}
    for some in (found, {plans[0]: found[plans[0]]}):
        assert list(faults(lambda some=some: plot_plans(some, COSTS))) == []
    (dots, _) = plot_plans(found, COSTS).axes[0].collections[-2:]
    assert dots.get_array().tolist() == [16, 4, 8, 6]


def test_the_plans_policy_is_the_one_it_was_chosen_with() -> None:
    plan = LayerPlan.full(2)
    fixed, unset = DraftPlan(plan, 3).new_policy(), DraftPlan(plan).new_policy()
    assert isinstance(fixed, FixedLength) and (fixed.gamma, unset.gamma) == (3, 4)
    policy = DraftPlan(plan, 6, 0.45).new_policy()
    assert isinstance(policy, AdaptiveExit)
    assert (policy.gamma, policy.threshold, policy.step) == (6, 0.45, 0.0)


def test_every_prompt_is_searched_on_or_judged_on_or_held_out() -> None:
    for count in range(4, 12):
        texts = [Continuation((number,), (1,) * 16) for number in range(count)]
        parts = split_texts(texts)
        assert all(parts)
        assert sorted(itertools.chain(*parts), key=lambda text: text.prompt) == texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two layers, and prompts."""
    folder = write_folder(tmp_path / "my model", {**LLAMA, "num_hidden_layers": 2})
    (tmp_path / "prompts.txt").write_text("the hen\nan inn\nthe tin\na hen\n", encoding="utf-8")
    return folder


def arguments(folder: Path, *more: object) -> list[str]:
    prompts = folder.parent / "prompts.txt"
    fixed = ["--max-new-tokens", 16, "--device", "cpu"]
    return [*map(str, ["--model", folder, "--calibration", prompts, *fixed, *more])]


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.study.measure_sublayers", lambda *how: COSTS)
    monkeypatch.setattr("search.costs.PATIENCE", 0.0)


@pytest.mark.usefixtures("known_costs")
def test_the_command_writes_a_plan_and_pictures_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, plots = tmp_path / "plan.json", tmp_path / "plots"
    assert command.main(arguments(folder, "--out", out, "--trials", 6, "--plots", plots)) == 0
    written = json.loads(out.read_text())
    assert written["model"] == model_fingerprint(folder)
    assert written["sampling"]["coupling"] == "race", "as the texts of generate.py"
    gamma = read_plan(out, 2, folder).gamma
    assert gamma == written["gamma"] and (gamma > 0) == (written["measured_speedup"] > 1)
    assert [path.name for path in plots.iterdir()] == ["front.svg"]
    said = " ".join(capfd.readouterr().err.split())
    assert "trying plans" in said and "best predicted speed-up" in said
    named = shlex.quote(str(folder))
    use = f'python generate.py "Your prompt" --model {named} --draft skip --plan {out}'
    assert (use in said) == (gamma > 0)
    assert command.main(arguments(folder, "--out", out, "--trials", 8)) == 2
    assert "give --resume" in capfd.readouterr().err
    for name in ("plain_texts", "measure_sublayers", "importances"):  # all in the journal
        monkeypatch.delattr(f"search.study.{name}")
    assert command.main(arguments(folder, "--out", out, "--trials", 8, "--resume")) == 0
    storage = JournalStorage(JournalFileBackend(str(out.with_suffix(".journal"))))
    assert len(finished(optuna.load_study(study_name=NAME, storage=storage))) == 8
    for changed, named in (
        (["--temperature", 1, "--bits", 4], "other bits, sampling"),
        (["--coupling", "ratio"], "other sampling"),
    ):
        assert command.main(arguments(folder, "--out", out, "--resume", *changed)) == 2
        assert f"another search ({named})" in capfd.readouterr().err


@pytest.mark.usefixtures("known_costs")
def test_after_ctrl_c_the_best_plan_found_is_run_and_turned_off_where_it_does_not_pay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = itertools.count()

    def half_as_fast(*given: object) -> object:
        return [(chosen, {**row, "speed-up": 0.5}) for chosen, row in confirm(*given)]

    monkeypatch.setattr(
        command,
        "predict_plan",
        lambda calibration, costs, plan: interrupted() if next(calls) == 5 else toy(plan),
    )
    monkeypatch.setattr(command, "confirm", half_as_fast)
    out = tmp_path / "plan.json"
    given = arguments(folder, "--out", out, "--trials", 100, "--seed", 16)
    assert command.main(given) == 130
    assert json.loads(out.read_text())["measured_speedup"] == 0.5
    assert read_plan(out, 2, folder).gamma == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "no plan beats plain decoding" in said and how_to_continue(given) in said


def how_to_continue(given: list[str]) -> str:
    resuming = shlex.join(["python", "-m", "search", *given, "--resume"])
    return f"interrupted; to continue: {resuming}"


def test_ctrl_c_before_the_first_trial_says_how_to_continue(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("search.study.importances", interrupted)
    given = arguments(folder, "--out", tmp_path / "plan.json")
    assert command.main(given) == 130
    assert how_to_continue(given) in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--trials", 0], "--trials: must be at least 1, found 0"),
        (["--seed", 2**31], f"--seed: must be from 0 to {2**31 - 1}, found {2**31}"),
        (["--out", "/nowhere/plan.json"], "/nowhere/plan.json cannot be written"),
        (["--plots", "/dev/null/x"], "/dev/null/x cannot be read or written"),
        (["--calibration", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["--max-new-tokens", 4], "and 32 tokens after them in all"),
        (
            ["--calibration", Path(__file__).with_name("__init__.py")],
            "a search needs at least 4 prompts",
        ),
        (["--temperature", -1], "temperature must be at least 0"),
    ],
)
@pytest.mark.usefixtures("known_costs")
def test_bad_input_is_refused_in_one_line(
    options: list[object], complaint: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_of(command.main, arguments(folder, *options)) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[")]
    assert len(said) == 1 and said[0].startswith("error: ") and complaint in said[0]


def test_a_journal_that_is_none_or_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    study = open_study(path, IDENTITY, "tpe", 0, resume=False)
    study.set_user_attr("identity", IDENTITY)
    study.enqueue_trial({})
    said = refusal(open_study, path, {**IDENTITY, "model": "b"}, "tpe", 0, resume=True)
    assert "another search (other model)" in said
    for damaged in ("not a journal\nat all\n", '{"op_code": 99}\n'):
        path.write_text(damaged)
        said = refusal(open_study, path, IDENTITY, "tpe", 0, resume=True)
        assert "not a search's journal" in said
