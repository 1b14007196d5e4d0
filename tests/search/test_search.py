"""Search: the optimum that it finds, its journal, confirmation, pictures, and wrong input."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from decoding.policies import AdaptiveExit, FixedLength
from decoding.rounds import Round
from decoding.run.acceptance import Calibration, Continuation
from decoding.run.chooser import Setting
from decoding.run.costs import BITS, SublayerCosts
from decoding.run.plan_file import DraftPlan, read_plan, write_plan
from decoding.run.prediction import Prediction
from decoding.sampling import SamplingParams
from decoding.text import Rules
from model import InputError, LayerPlan
from model.plan import FULL, LOW_BITS
from search import __main__ as command
from search.confirm import Confirmation, confirm, kept_by_depth
from search.costs import counts_of, measure_sublayers, measured_plans
from search.plots import front, mean_bits, plan_and_acceptance
from search.study import (
    NAME,
    SAMPLERS,
    Candidate,
    Objective,
    begin,
    candidates,
    finished,
    importances,
    kept_costs,
    kept_texts,
    open_study,
    optimise,
    parameters,
    plan_of,
    quiet_optuna,
    space_of,
    starts,
)
from search.texts import MOST_PROMPTS, read_prompts, split, write_texts
from tests.folders import LLAMA, byte_tokenizer, write_folder
from tests.laws import tiny_model
from tests.pictures import faults
from weights.cli.files import write_json
from weights.load import model_fingerprint

BY_BITS = [bits / FULL for bits in BITS]  # shares of the cost of a sublayer
COSTS = SublayerCosts(
    *(tuple(cost * share for share in BY_BITS) for cost in (0.1, 0.12, 0.1)),
    confidence=0.02,
    verify=(1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4),
)
GREEDY = SamplingParams()
IDENTITY = {"model": "a", "bits": [0]}
SPACE = space_of(4, (0, *LOW_BITS))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_optuna()


def texts_of(vocab: int, count: int = 2, length: int = 12) -> list[Continuation]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, vocab, (count, 3 + length), generator=generator).tolist()
    return [Continuation(tuple(row[:3]), tuple(row[3:])) for row in draw]


def objective() -> Objective:
    return Objective(Calibration(tiny_model("llama", vocab=7, layers=4), texts_of(7), GREEDY), COSTS)


def in_memory(sampler: str = "tpe", seed: int = 0, first: Sequence[LayerPlan] = ()) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[sampler](seed))
    begin(study, {}, first)
    return study


def toy(plan: LayerPlan) -> Prediction:
    """A speed-up that prefers one plan, without a model."""
    wanted = LayerPlan.skipping(plan.num_layers, [0], [0, plan.num_layers - 1])
    equal = sum(a == b for a, b in zip(plan.attention + plan.mlp, wanted.attention + wanted.mlp, strict=True))
    return Prediction(equal / 4, 4, 0.0, 0.5, 0.6, [0.6], 2.0)


def test_parameters_and_plan_are_inverse() -> None:
    for bits in itertools.product([FULL, *LOW_BITS, 0], repeat=4):
        plan = LayerPlan(bits[:2], bits[2:], head=bits[0] or LOW_BITS[0])
        assert plan_of(parameters(plan)) == plan


def test_a_space_offers_every_sublayer_its_bits_and_the_head_those_that_are_not_0() -> None:
    assert set(SPACE["attn 0"]) == set(SPACE["mlp 3"]) == {0, *LOW_BITS, FULL}
    assert set(SPACE["head"]) == {*LOW_BITS, FULL}
    assert len(SPACE) == 9
    assert space_of(1, [8]) == {"attn 0": [FULL, 8], "mlp 0": [FULL, 8], "head": [FULL, 8]}


def test_the_costs_of_all_sublayers_follow_from_the_measured_plans() -> None:
    plans = list(measured_plans(6))
    sizes = torch.tensor([counts_of(plan) for plan in plans], dtype=torch.float64)
    assert torch.linalg.matrix_rank(sizes) == 3 * len(BITS)
    drafts = torch.tensor([[COSTS.draft(plan)] for plan in plans], dtype=torch.float64)
    fitted = torch.linalg.lstsq(sizes, drafts).solution[:, 0].tolist()
    assert fitted == pytest.approx([*COSTS.base, *COSTS.attention, *COSTS.mlp])


def test_the_search_finds_the_optimum_that_exhaustive_enumeration_finds() -> None:
    """All 256 plans of a 4-layer model with or without each sublayer, against half as many trials of the search."""
    predict_once, space = functools.cache(objective()), {**space_of(4, [0]), "head": [FULL]}
    best = max(
        predict_once(LayerPlan(flags[:4], flags[4:])).speedup for flags in itertools.product([FULL, 0], repeat=8)
    )
    study = in_memory(first=starts(importances(objective().calibration), COSTS, space))
    optimise(study, predict_once, space, 128)
    assert candidates(study)[0].prediction.speedup == best


def test_the_same_seed_finds_the_same_plans() -> None:
    found = []
    for _ in range(2):
        study = in_memory(seed=3, first=[LayerPlan.early_exit(4, 2)])
        optimise(study, toy, SPACE, 25)
        found.append([trial.params for trial in finished(study)])
    assert found[0] == found[1]


def test_a_plan_that_was_tried_is_not_evaluated_again() -> None:
    seen: list[LayerPlan] = []

    def counting(plan: LayerPlan) -> Prediction:
        seen.append(plan)
        return toy(plan)

    study = in_memory("random")
    optimise(study, counting, space_of(1, [0, 4]), 40)  # one layer has 18 such plans
    assert len(seen) == len(set(seen)) <= 18
    assert len(finished(study)) == 40
    assert len(candidates(study)) == len(seen)


def test_starts_are_distinct_plans_and_skip_the_least_important_sublayers_first() -> None:
    lost = {"attn": [0.5, 0.5, 0.01, 0.5], "mlp": [0.5, 0.02, 0.5, 0.5]}
    plans, low = starts(lost, COSTS, SPACE), sorted(LOW_BITS)
    full, most = LayerPlan.full(4), low[-1]
    assert plans[: len(low)] == [full.in_bits(bits, head=most) for bits in low]
    thinned = [LayerPlan.skipping(4, [2], []), LayerPlan.skipping(4, [2], [1])]
    assert [plan for plan in plans if not plan.has_low_bits][:2] == thinned
    assert plans[len(low) : len(low) + 2] == [plan.in_bits(low[0], head=most) for plan in thinned]
    assert LayerPlan.early_exit(4, 2).in_bits(low[0], head=most) in plans
    assert len(set(plans)) == len(plans)
    assert full not in plans
    assert LayerPlan.early_exit(4, 2) in plans
    assert starts({"attn": [0.1], "mlp": [0.1]}, COSTS, space_of(1, [0]))  # a model of one layer has some, too


@pytest.mark.parametrize("bits", [[0], [4], [0, 8], [8, 4]])
def test_starts_have_no_bits_but_those_that_may_be_tried(bits: list[int]) -> None:
    plans = starts({"attn": [0.1] * 4, "mlp": [0.2] * 4}, COSTS, space_of(4, bits))
    assert plans
    for plan in plans:
        assert {*plan.attention, *plan.mlp} <= {*bits, FULL}
        assert plan.head in {*bits, FULL} - {0}


def search_until_killed(path: Path, trials: int) -> None:
    def evaluate(plan: LayerPlan) -> Prediction:
        if len(finished(study)) >= trials:
            os._exit(9)
        return toy(plan)

    study = open_study(path, IDENTITY, "tpe", 0, resume=True)
    begin(study, {"identity": IDENTITY}, [])
    optimise(study, evaluate, SPACE, 100)


def test_a_killed_search_resumes_without_losing_a_finished_trial(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    process = multiprocessing.get_context("fork").Process(target=search_until_killed, args=(path, 5))
    process.start()
    process.join()
    assert process.exitcode == 9
    study = open_study(path, IDENTITY, "tpe", 0, resume=True)
    before = [(trial.number, trial.params, trial.value) for trial in finished(study)]
    assert len(before) == 5
    optimise(study, toy, SPACE, 9)
    trials = finished(open_study(path, IDENTITY, "tpe", 0, resume=True))
    assert [(trial.number, trial.params, trial.value) for trial in trials][:5] == before
    assert len(trials) == 9


def test_a_study_keeps_the_texts_and_costs_that_it_was_begun_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    study = open_study(path, IDENTITY, "tpe", 0, resume=False)
    attributes = {"identity": IDENTITY, "texts": [asdict(text) for text in texts_of(7)], "costs": asdict(COSTS)}
    begin(study, attributes, [LayerPlan.early_exit(4, 2)])
    joined = open_study(path, IDENTITY, "tpe", 0, resume=True)
    begin(joined, {"texts": [], "costs": {}}, [LayerPlan.early_exit(4, 3)])
    assert kept_costs(joined) == COSTS
    assert kept_texts(joined) == texts_of(7)
    assert len(joined.trials) == 1


def test_sublayer_costs_add_up() -> None:
    assert COSTS.draft(LayerPlan((4, 8, 0), (0, FULL, 4), head=8)) == pytest.approx(
        0.5 * 0.1 + (0.25 + 0.5) * 0.1 + (1 + 0.25) * 0.12
    )
    measured = measure_sublayers(tiny_model("llama", vocab=7, layers=4), SamplingParams(1.0))
    assert measured.verify[0] == 1.0
    assert len(measured.verify) == 9
    assert measured.draft(LayerPlan.full(4)) > measured.base[-1]


def test_predicted_acceptance_is_measured_acceptance_on_held_out_prompts(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=7, layers=4)
    held_out = write_texts(model, [(1, 2), (3, 4, 5)], GREEDY, Rules(20), 0)
    setting = Setting(tmp_path, model, byte_tokenizer(), GREEDY, 64)
    found = [
        Candidate(plan, Prediction(1.0, gamma, threshold, 0.0, 0.0, [], 0.0))
        for plan, gamma, threshold in [(LayerPlan.early_exit(4, 2), 3, 0.0), (LayerPlan.skipping(4, [1], [2]), 5, 0.0)]
    ]
    for one in confirm(setting, COSTS, held_out, found, Rules(20), 0):
        assert one.acceptance_rate == pytest.approx(one.predicted.acceptance_rate, abs=1e-9)
        assert one.tokens_per_round == pytest.approx(one.predicted.tokens_per_round, abs=1e-9)
        assert one.kept_by_depth == pytest.approx(one.predicted.kept_by_depth, abs=1e-9)
        assert one.speedup > 0


PLANS = [
    LayerPlan.full(6),
    LayerPlan.full(6).in_bits(4),
    LayerPlan.early_exit(6, 3),
    LayerPlan((0, 4, 8, FULL, 4, 4), (4, 0, 8, FULL, 8, 0), head=8),
]
TRIED = [
    Candidate(plan, Prediction(1.3 - at / 5, 2, 0.0, 0.5, 0.9 - at / 5, [0.9, 0.8], 2.0))
    for at, plan in enumerate(PLANS)
]


@pytest.mark.parametrize("trials", [1, 4])
def test_the_pictures_of_a_search_are_in_order(trials: int) -> None:
    """However few plans were tried, and whether or not they were run."""
    best = TRIED[trials - 1]
    confirmation = Confirmation(best, best.prediction, 1.1, 0.48, 2.0, [0.9, 0.7])
    assert list(faults(lambda: front(TRIED[:trials], COSTS))) == []
    for measured in (None, confirmation):
        assert list(faults(lambda measured=measured: plan_and_acceptance(best, measured))) == []


def test_the_pictures_show_the_bits_of_a_plan() -> None:
    """Each sublayer's in the map of the best plan; their mean as the colour of a plan's dot."""
    assert [mean_bits(plan) for plan in PLANS] == [16, 4, 8, 6]
    (dots, _) = front(TRIED, COSTS).axes[0].collections[-2:]
    assert dots.get_array().tolist() == [mean_bits(plan) for plan in PLANS]
    cells = plan_and_acceptance(TRIED[-1], None).axes[0]
    assert [text.get_text() for text in cells.texts] == ["×", "4", "8", "", "4", "4", "4", "×", "8", "", "8", "×"]


def test_measured_acceptance_by_depth_counts_the_drafts_that_verification_came_to() -> None:
    rounds = [
        Round(0, [1, 2, 3], 1, [1, 9]),  # the second was rejected
        Round(2, [4, 5, 6], 3, [4, 5, 6, 7]),
        Round(6, [8], 1, [8, 9]),  # ended early, by a threshold
        Round(8, [8, 9], 2, [8]),  # the text ended with the first
        Round(9, [], 0, [2]),
    ]
    assert kept_by_depth(rounds, 4) == [1.0, 0.5, 1.0, 0.0]


def test_a_plan_file_comes_back_as_it_was_and_only_for_its_model(tmp_path: Path) -> None:
    model, other = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", seed=1)
    path = tmp_path / "plan.json"
    chosen = DraftPlan(LayerPlan.skipping(4, [1], [0, 3]), 5, 0.6)
    write_plan(path, chosen, model_fingerprint(model), {"measured_speedup": 1.2})
    assert read_plan(path, 4, model) == chosen
    assert read_plan(path, 4) == chosen
    with pytest.raises(InputError, match="made for another model"):
        read_plan(path, 4, other)
    write_json(path, {"attn": [1]})
    assert read_plan(path, 4, other).plan == LayerPlan.skipping(4, [1], [])
    with pytest.raises(InputError, match="cannot be written"):
        write_plan(tmp_path / "plan.json" / "x", chosen, "", {})


def test_a_fingerprint_is_of_config_and_numbers(tmp_path: Path) -> None:
    same = [model_fingerprint(write_folder(tmp_path / name)) for name in ("a", "b")]
    assert same[0] == same[1]
    write_json(tmp_path / "b" / "config.json", {**LLAMA, "rope_theta": 20000.0})
    assert model_fingerprint(tmp_path / "b") != same[0]
    assert model_fingerprint(write_folder(tmp_path / "c", seed=5)) != same[0]
    assert model_fingerprint(write_folder(tmp_path / "d", dtype=torch.bfloat16)) != same[0]


def test_the_plans_policy_is_the_one_it_was_chosen_with() -> None:
    plan = LayerPlan.full(2)
    fixed, unset = DraftPlan(plan, 3).new_policy(4), DraftPlan(plan).new_policy(4)
    assert isinstance(fixed, FixedLength) and (fixed.gamma, unset.gamma) == (3, 4)
    exit_policy = DraftPlan(plan, 6, 0.45).new_policy(4)
    assert isinstance(exit_policy, AdaptiveExit)
    assert (exit_policy.gamma, exit_policy.threshold, exit_policy.step) == (6, 0.45, 0.0)


def test_prompts_are_read_from_lines_and_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\n two \n", encoding="utf-8")
    assert read_prompts(text) == ["one", " two "]
    lines.write_text(
        "".join(json.dumps({"prompt": f"p{n}", "response": "r"}) + "\n" for n in range(100)), encoding="utf-8"
    )
    found = read_prompts(lines)
    assert len(found) == MOST_PROMPTS
    assert found[0] == "p0" and found[-1] != f"p{MOST_PROMPTS - 1}"
    assert len(read_prompts(None)) == 24


def test_every_prompt_is_searched_with_or_held_out() -> None:
    for count in range(2, 12):
        texts = [Continuation((number,), (1,)) for number in range(count)]
        searched, held_out = split(texts)
        assert searched and held_out
        assert sorted(text.prompt for text in searched + held_out) == [text.prompt for text in texts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its costs on file, so that no test waits for them to be measured."""
    folder = write_folder(tmp_path / "model", {**LLAMA, "num_hidden_layers": 2})
    (tmp_path / "prompts.txt").write_text("the hen\nan inn\nthe tin\n", encoding="utf-8")
    return folder


def arguments(folder: Path, *more: object) -> list[str]:
    fixed = ["--model", folder, "--calibration", folder.parent / "prompts.txt", "--max-new-tokens", 16]
    return [str(word) for word in [*fixed, "--device", "cpu", *more]]


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_sublayers", lambda model, params: COSTS)


@pytest.mark.usefixtures("known_costs")
def test_the_command_writes_a_plan_and_pictures_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, plots = tmp_path / "plan.json", tmp_path / "plots"
    assert command.main(arguments(folder, "--out", out, "--trials", 10, "--plots", plots)) == 0
    written = json.loads(out.read_text())
    assert written["model"] == model_fingerprint(folder)
    assert written["measured_speedup"] is not None
    assert (written["gamma"] > 0) == (written["measured_speedup"] > 1)
    assert read_plan(out, 2, folder).gamma == written["gamma"]
    assert sorted(path.name for path in plots.iterdir()) == ["front.svg", "plan.svg"]
    assert command.main(arguments(folder, "--out", out, "--trials", 12)) == 2
    assert "give --resume" in capfd.readouterr().err
    for name in ("write_texts", "kept", "importances"):  # all in the journal
        monkeypatch.delattr(command, name)
    assert command.main(arguments(folder, "--out", out, "--trials", 12, "--resume")) == 0
    storage = JournalStorage(JournalFileBackend(str(out.with_suffix(".journal"))))
    assert len(finished(optuna.load_study(study_name=NAME, storage=storage))) == 12
    assert command.main(arguments(folder, "--out", out, "--resume", "--temperature", 1, "--bits", 4)) == 2
    assert "another search (other bits, sampling)" in capfd.readouterr().err


@pytest.mark.usefixtures("known_costs")
def test_ctrl_c_keeps_what_was_found_and_writes_the_plan(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = itertools.count()

    def interrupted(self: Objective, plan: LayerPlan) -> Prediction:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return replace(toy(plan), speedup=1.3)

    monkeypatch.setattr(Objective, "__call__", interrupted)
    out = tmp_path / "plan.json"
    assert command.main(arguments(folder, "--out", out, "--trials", 100)) == 130
    written = json.loads(out.read_text())
    assert (written["gamma"], written["predicted_speedup"], written["measured_speedup"]) == (4, 1.3, None)
    assert "predicted, not run" in capfd.readouterr().err


@pytest.mark.usefixtures("known_costs")
def test_where_no_plan_pays_the_plan_file_turns_speculation_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = confirm

    def half_as_fast(*given: object) -> object:
        return [replace(one, speedup=0.5) for one in slow(*given)]

    monkeypatch.setattr(command, "confirm", half_as_fast)
    out = tmp_path / "plan.json"
    assert command.main(arguments(folder, "--out", out, "--trials", 3)) == 0
    assert read_plan(out, 2, folder).gamma == 0
    assert "no plan beats plain decoding" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--trials", 0], "--trials must be at least 1"),
        (["--seed", -1], "--seed must be from 0"),
        (["--out", "x.journal"], "stores its trials in that file"),
        (["--out", "/nowhere/plan.json"], "/nowhere/plan.json cannot be written"),
        (["--plots", "/dev/null/x"], "/dev/null/x cannot be read or written"),
        (["--calibration", "/nowhere.txt"], "/nowhere.txt cannot be read"),
        (["--max-new-tokens", 4], "too few to measure a plan"),
        (["--max-new-tokens", 300], "exceed the model's context"),
        (["--temperature", -1], "temperature must be at least 0"),
    ],
)
@pytest.mark.usefixtures("known_costs")
def test_bad_input_is_refused_in_one_line(
    options: list[object], complaint: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments(folder, *options)) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[")]
    assert len(said) == 1
    assert said[0].startswith("error: ") and complaint in said[0]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.txt", "", "holds 0 prompts"),
        ("p.txt", "only one\n", "holds 1 prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "line 2"),
        ("p.jsonl", '["a"]\nno json\n', "line 1"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n{"prompt": "a"}\n', "line 1 is not valid JSON"),
        ("p.txt", b"\xff\xfe\n", "cannot be read as UTF-8"),
    ],
)
def test_a_bad_calibration_file_is_refused(name: str, content: str | bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=complaint):
        read_prompts(path)


def test_a_journal_that_is_none_or_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    begin(open_study(path, IDENTITY, "tpe", 0, resume=False), {"identity": IDENTITY}, [LayerPlan.full(1)])
    with pytest.raises(InputError, match=r"another search \(other model\)"):
        open_study(path, {**IDENTITY, "model": "b"}, "tpe", 0, resume=True)
    path.write_text("not a journal\nat all\n")
    with pytest.raises(InputError, match="not a search's journal"):
        open_study(path, IDENTITY, "tpe", 0, resume=True)
