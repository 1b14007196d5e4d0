"""The search finds what there is to find, keeps what it found, and refuses what it cannot use."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optuna.storages.journal import JournalFileSymlinkLock

from decoding.policies import AdaptiveExit, FixedLength
from decoding.randomness import SeededRandomness
from decoding.run.acceptance import Acceptance, Calibration, Continuation
from decoding.run.costs import CostTable, SublayerCosts
from decoding.run.plan_file import DraftPlan, read_plan, write_plan
from decoding.run.prediction import Prediction, predict
from decoding.sampling import SamplingParams
from model import InputError, LayerPlan
from model.plan import FULL
from search import __main__ as command
from search import study as study_module
from search.compare import compare, greedy, remembering
from search.confirm import Confirmation, confirm
from search.costs import counts_of, measure_sublayers, measured_plans
from search.plots import front, importance_map, mean_bits, pareto, predicted_and_measured, progress_of
from search.study import (
    Candidate,
    Evaluator,
    candidates,
    costs_of,
    enqueue,
    finished,
    importance,
    open_study,
    optimise,
    parameters,
    plan_of,
    quiet_optuna,
    starts,
)
from search.texts import MOST_PROMPTS, read_prompts, split
from tests.folders import LLAMA, write_folder
from tests.laws import tiny_model
from tests.pictures import faults
from tests.search.loop import run
from weights.cli.files import write_json
from weights.fingerprint import model_fingerprint

BY_BITS = (0.3, 0.6, 1.0)  # of what a sublayer costs
COSTS = SublayerCosts(
    *(tuple(cost * share for share in BY_BITS) for cost in (0.1, 0.12, 0.1)),
    confidence=0.02,
    overhead=0.05,
    verify=(1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4),
)
GREEDY = SamplingParams()
IDENTITY = {"model": "a", "space": 8}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_optuna()


def texts_of(vocab: int, count: int = 2, length: int = 12) -> list[Continuation]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, vocab, (count, 3 + length), generator=generator).tolist()
    return [Continuation(tuple(row[:3]), tuple(row[3:])) for row in draw]


def evaluator(layers: int = 4) -> Evaluator:
    model = tiny_model("llama", vocab=7, layers=layers)
    return Evaluator(Calibration(model, texts_of(7), GREEDY), COSTS)


def toy(plan: LayerPlan) -> Prediction:
    """A speed-up that prefers one plan, without a model."""
    wanted = LayerPlan.skipping(plan.num_layers, [0], [0, plan.num_layers - 1])
    equal = sum(a == b for a, b in zip(plan.attention + plan.mlp, wanted.attention + wanted.mlp, strict=True))
    return Prediction(equal / 4, 4, 0.0, 0.5, 0.6, (0.6,), 2.0)


def test_parameters_and_plan_are_inverse() -> None:
    for bits in itertools.product([FULL, 8, 4, 0], repeat=4):
        plan = LayerPlan(bits[:2], bits[2:], head=bits[0] or 4)
        assert plan_of(parameters(plan)) == plan


def test_a_draft_step_costs_what_its_sublayers_and_its_head_cost_in_their_bits() -> None:
    assert COSTS.draft(LayerPlan.full(4)) == pytest.approx(0.1 + 4 * 0.1 + 4 * 0.12)
    assert COSTS.draft(LayerPlan((4, 8, 0), (0, FULL, 4), head=8)) == pytest.approx(
        0.6 * 0.1 + (0.3 + 0.6) * 0.1 + (1 + 0.3) * 0.12
    )


def test_the_costs_of_all_sublayers_follow_from_the_measured_plans() -> None:
    plans = list(measured_plans(6))
    sizes = torch.tensor([counts_of(plan) for plan in plans], dtype=torch.float64)
    assert torch.linalg.matrix_rank(sizes) == 9
    drafts = torch.tensor([[COSTS.draft(plan)] for plan in plans], dtype=torch.float64)
    fitted = torch.linalg.lstsq(sizes, drafts).solution[:, 0].tolist()
    assert fitted == pytest.approx([*COSTS.base, *COSTS.attention, *COSTS.mlp])


def test_the_search_finds_the_optimum_that_exhaustive_enumeration_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 256 plans of a 4-layer model with or without each sublayer, against half as many trials of the search."""
    monkeypatch.setattr(study_module, "choices", lambda name: [FULL] if name == "head" else [FULL, 0])
    evaluate = remembering(evaluator())
    flags = itertools.product([FULL, 0], repeat=8)
    best = max(evaluate(LayerPlan(flag[:4], flag[4:])).speedup for flag in flags)
    study = open_study(None, IDENTITY, "tpe", 0, resume=False)
    losses = importance(evaluator().calibration)
    enqueue(study, [plan for plan in starts(losses, COSTS) if not plan.has_low_bits])
    optimise(study, evaluate, COSTS, 4, 128)
    assert candidates(study)[0].prediction.speedup == best


def test_the_same_seed_finds_the_same_plans() -> None:
    found = []
    for _ in range(2):
        study = open_study(None, IDENTITY, "tpe", 3, resume=False)
        enqueue(study, [LayerPlan.early_exit(4, 2)])
        optimise(study, toy, COSTS, 4, 25)
        found.append([trial.params for trial in finished(study)])
    assert found[0] == found[1]


def test_a_plan_that_was_tried_is_not_evaluated_again() -> None:
    seen: list[LayerPlan] = []

    def counting(plan: LayerPlan) -> Prediction:
        seen.append(plan)
        return toy(plan)

    study = open_study(None, IDENTITY, "random", 0, resume=False)
    optimise(study, counting, COSTS, 1, 60)  # one layer has 48 plans
    assert len(seen) == len(set(seen)) <= 48
    assert len(finished(study)) == 60
    assert len(candidates(study)) == len(seen)


def test_starts_are_distinct_plans_and_skip_the_least_important_sublayers_first() -> None:
    losses = {"attn": [0.5, 0.5, 0.01, 0.5], "mlp": [0.5, 0.02, 0.5, 0.5]}
    plans = starts(losses, COSTS)
    assert plans[:2] == [LayerPlan.full(4).in_bits(4), LayerPlan.full(4).in_bits(8)]
    thinned = [LayerPlan.skipping(4, [2], []), LayerPlan.skipping(4, [2], [1])]
    assert [plan for plan in plans if not plan.has_low_bits][:2] == thinned
    assert plans[2:4] == [plan.in_bits(4) for plan in thinned]
    assert LayerPlan.early_exit(4, 2).in_bits(4) in plans
    assert len(set(plans)) == len(plans)
    assert LayerPlan.full(4) not in plans
    assert LayerPlan.early_exit(4, 2) in plans
    assert starts({"attn": [0.1], "mlp": [0.1]}, COSTS)  # a model of one layer has some, too


def search_until_killed(path: Path, trials: int) -> None:
    def evaluate(plan: LayerPlan) -> Prediction:
        if len(finished(study)) >= trials:
            os._exit(9)
        return toy(plan)

    study = open_study(path, IDENTITY, "tpe", 0, resume=True)
    optimise(study, evaluate, COSTS, 4, 100)


def test_a_killed_search_resumes_without_losing_a_finished_trial(tmp_path: Path) -> None:
    """Killed inside a trial, and again with half a line in the journal."""
    path = tmp_path / "plan.journal"
    process = multiprocessing.get_context("fork").Process(target=search_until_killed, args=(path, 5))
    process.start()
    process.join()
    assert process.exitcode == 9
    before = [
        (trial.number, trial.params, trial.value)
        for trial in finished(open_study(path, IDENTITY, "tpe", 0, resume=True))
    ]
    assert len(before) == 5
    with path.open("ab") as journal:
        journal.write(b'{"op_code":6,"worker')
    study = open_study(path, IDENTITY, "tpe", 0, resume=True)
    optimise(study, toy, COSTS, 4, 9)
    after = [
        (trial.number, trial.params, trial.value)
        for trial in finished(open_study(path, IDENTITY, "tpe", 0, resume=True))
    ]
    assert after[:5] == before
    assert len(after) == 9


def test_a_study_predicts_from_the_costs_of_whoever_began_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    assert costs_of(open_study(path, IDENTITY, "tpe", 0, resume=False), COSTS) == COSTS
    elsewhere = replace(COSTS, attention=(9.0, 9.0, 9.0))
    assert costs_of(open_study(path, IDENTITY, "tpe", 0, resume=True), elsewhere) == COSTS


def test_opening_a_journal_leaves_a_line_that_is_being_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes holds the lock; half a line without it was left by a process that is gone."""
    path = tmp_path / "plan.journal"
    open_study(path, IDENTITY, "tpe", 0, resume=False)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"half a')
    held: list[str] = []
    monkeypatch.setattr(JournalFileSymlinkLock, "acquire", lambda lock: held.append("taken") or True)
    monkeypatch.setattr(os, "truncate", lambda name, size: held.append("cut") or Path(name).write_bytes(whole))
    monkeypatch.setattr(JournalFileSymlinkLock, "release", lambda lock: held.append("released"))
    open_study(path, IDENTITY, "tpe", 0, resume=True)
    assert held[:3] == ["taken", "cut", "released"]


def test_the_speed_up_is_tokens_over_the_cost_of_the_rounds() -> None:
    """The full plan drafts what the target writes: every round keeps all, so the arithmetic is by hand."""
    ones, length = torch.ones(1, 1, 6, dtype=torch.float64), torch.tensor([6])
    acceptance = Acceptance(ones, ones, ones, ones, length, length)
    costs = CostTable(0.98, (1.0, 1.05, 1.1))
    found = predict(acceptance, costs, [2], overhead=0.05)
    cost = 2 * (2 * 0.98 + 1.1 + 0.05)  # rounds of 2 drafted and 3 written tokens
    assert found.speedup == pytest.approx(6 * 1.05 / cost)
    assert (found.acceptance_rate, found.kept_share, found.tokens_per_round) == (1.0, 1.0, 3.0)
    unsure = Acceptance(ones, 0.4 * ones, 0.4 * ones, ones, length, length)
    stopping = predict(unsure, costs, [2], [0.5], overhead=0.05, confidence=0.02)  # each draft ends after one token
    assert stopping.speedup == pytest.approx(6 * 1.05 / (3 * (0.98 + 0.02 + 1.05 + 0.05)))
    assert predict(unsure, costs, [1, 2], [0.0, 0.5], confidence=0.02).threshold == 0.0


def test_sublayer_costs_add_up() -> None:
    assert COSTS.draft(LayerPlan.skipping(4, [0, 1, 2], [0])) == pytest.approx(0.1 + 1 * 0.1 + 3 * 0.12)
    measured = measure_sublayers(tiny_model("llama", vocab=7, layers=4), SamplingParams(1.0))
    assert measured.verify[0] == 1.0
    assert len(measured.verify) == 9
    assert measured.draft(LayerPlan.full(4)) > measured.base[-1]


def test_predicted_acceptance_is_measured_acceptance_on_held_out_prompts() -> None:
    model = tiny_model("llama", vocab=7, layers=4)
    held_out = []
    for prompt in [(1, 2), (3, 4, 5)]:
        rounds = run(model, prompt, LayerPlan.full(4), FixedLength(0), GREEDY, SeededRandomness(0), 20)
        held_out.append(Continuation(prompt, tuple(token for round in rounds for token in round.emitted)))
    found = [
        Candidate(plan, Prediction(1.0, gamma, threshold, 0.0, 0.0, (), 0.0), 0.5)
        for plan, gamma, threshold in [(LayerPlan.early_exit(4, 2), 3, 0.0), (LayerPlan.skipping(4, [1], [2]), 5, 0.0)]
    ]
    for one in confirm(model, found, held_out, COSTS, GREEDY, frozenset(), 20, 0, "ratio"):
        assert one.acceptance_rate == pytest.approx(one.predicted.acceptance_rate, abs=1e-9)
        assert one.tokens_per_round == pytest.approx(one.predicted.tokens_per_round, abs=1e-9)
        assert one.speedup > 0


def test_greedy_and_samplers_are_compared_at_equal_trials() -> None:
    seen: list[LayerPlan] = []

    def counting(plan: LayerPlan) -> Prediction:
        seen.append(plan)
        return toy(plan)

    first = [LayerPlan.early_exit(4, 2), LayerPlan.early_exit(4, 3)]
    assert greedy(counting, first, 40) == 2.0  # at most 8 sublayers to change, and the optimum agrees in all
    assert len(seen) == len(set(seen)) <= 40
    results = compare(toy, COSTS, first, 8, range(2))
    assert set(results) == {"greedy", "tpe", "nsga2", "random"}
    assert all(len(values) == 2 and max(values) <= 2.0 for values in results.values())


PLANS = [
    LayerPlan.full(6),
    LayerPlan.full(6).in_bits(4),
    LayerPlan.early_exit(6, 3),
    LayerPlan((0, 4, 8, FULL, 4, 4), (4, 0, 8, FULL, 8, 0), head=8),
]
TRIED = [
    Candidate(plan, Prediction(1.3 - at / 5, 4, 0.0, 0.5, 0.9 - at / 5, (0.9,), 2.0), COSTS.draft(plan))
    for at, plan in enumerate(PLANS)
]


@pytest.mark.parametrize("trials", [1, 4])
def test_the_pictures_of_a_search_are_in_order(trials: int) -> None:
    """However few plans were tried."""
    losses = {"attn": [0.9, 0.0, 0.1, 0.2, 0.1, 0.8], "mlp": [0.1] * 6}
    found = TRIED[:trials]
    confirmed = [Confirmation(one, one.prediction, 1.1, 0.48, 2.0) for one in found[:3]]
    for draw in (
        lambda: importance_map(losses, PLANS[-1]),
        lambda: front(found, COSTS),
        lambda: progress_of([1.1, 0.7, 1.2, 0.9][:trials]),
        lambda: predicted_and_measured(confirmed),
    ):
        assert list(faults(draw)) == []


def test_the_pictures_show_the_bits_of_a_plan() -> None:
    """Each sublayer's in the map of the best plan; their mean as the colour of a plan's dot."""
    assert [mean_bits(plan) for plan in PLANS] == [16, 4, 8, 6]
    (dots, _) = front(TRIED, COSTS).axes[0].collections[-2:]
    assert dots.get_array().tolist() == [mean_bits(plan) for plan in PLANS]
    cells = importance_map({"attn": [0.1] * 6, "mlp": [0.1] * 6}, PLANS[-1]).axes[1]
    assert [text.get_text() for text in cells.texts] == ["×", "4", "8", "", "4", "4", "4", "×", "8", "", "8", "×"]


def test_the_pareto_front_keeps_what_no_other_beats() -> None:
    assert pareto([(0.5, 0.5), (0.4, 0.6), (0.7, 0.9), (0.7, 0.8), (0.9, 0.9)]) == [(0.4, 0.6), (0.7, 0.9)]


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
    fixed = [
        "--model",
        folder,
        "--calibration",
        folder.parent / "prompts.txt",
        "--max-new-tokens",
        16,
        "--device",
        "cpu",
    ]
    return [str(word) for word in [*fixed, *more]]


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_sublayers", lambda model, params: COSTS)


@pytest.mark.usefixtures("known_costs")
def test_the_command_writes_a_plan_and_pictures_and_resumes(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, plots = tmp_path / "plan.json", tmp_path / "plots"
    assert command.main(arguments(folder, "--out", out, "--trials", 10, "--plots", plots)) == 0
    written = json.loads(out.read_text())
    assert written["model"] == model_fingerprint(folder)
    assert written["measured_speedup"] is not None
    assert (written["gamma"] > 0) == (written["measured_speedup"] > 1)
    assert read_plan(out, 2, folder).gamma == written["gamma"]
    assert sorted(path.name for path in plots.iterdir()) == [
        "confirmation.svg",
        "front.svg",
        "history.svg",
        "importance.svg",
    ]
    assert command.main(arguments(folder, "--out", out, "--trials", 12)) == 2
    assert "give --resume" in capfd.readouterr().err
    assert command.main(arguments(folder, "--out", out, "--trials", 12, "--resume")) == 0
    study = open_study(out.with_suffix(".journal"), json.loads(json.dumps(identity_of(out))), "tpe", 0, resume=True)
    assert len(finished(study)) == 12
    assert command.main(arguments(folder, "--out", out, "--resume", "--temperature", 1)) == 2
    assert "something else (other sampling, texts)" in capfd.readouterr().err


def identity_of(out: Path) -> dict[str, object]:
    """What the journal beside a plan file says it is of."""
    for line in out.with_suffix(".journal").read_text().splitlines():
        attributes = json.loads(line).get("user_attr", {})
        if "identity" in attributes:
            return attributes["identity"]
    raise AssertionError("no identity")


@pytest.mark.usefixtures("known_costs")
def test_ctrl_c_keeps_what_was_found_and_writes_the_plan(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = itertools.count()

    def interrupted(self: Evaluator, plan: LayerPlan) -> Prediction:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return replace(toy(plan), speedup=1.3)

    monkeypatch.setattr(Evaluator, "__call__", interrupted)
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
        (["--compare", 0], "--compare must be at least 1"),
        (["--seed", -1], "--seed must be from 0"),
        (["--out", "x.journal"], "keeps its trials under that name"),
        (["--out", "/nowhere/plan.json"], "/nowhere/plan.json cannot be written"),
        (["--plots", "/dev/null/x"], "--plots: /dev/null/x"),
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
        ("p.jsonl", '\n{"prompt": "a"}\n\n{"prompt": 3}\n', "line 4"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n{"prompt": "a"}\n', "line 1 holds bytes that are not UTF-8"),
        ("p.txt", b"\xff\xfe\n", "cannot be read as UTF-8"),
    ],
)
def test_a_bad_calibration_file_is_refused(name: str, content: str | bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=complaint):
        read_prompts(path)


def test_a_prompt_may_hold_any_line_separator_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c\x85d"}\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b", "c\x85d"]


def test_a_journal_that_is_none_or_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.journal"
    open_study(path, IDENTITY, "tpe", 0, resume=False)
    with pytest.raises(InputError, match=r"something else \(other model\)"):
        open_study(path, {**IDENTITY, "model": "b"}, "tpe", 0, resume=True)
    path.write_text("not a journal\nat all\n")
    with pytest.raises(InputError, match="not a search's journal"):
        open_study(path, IDENTITY, "tpe", 0, resume=True)
