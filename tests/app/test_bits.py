"""Low-bit drafts: their plans; importance of inputs; calibration text."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from app.chooser import VERIFY_SLOPE, Setting, auto, first_slopes
from app.draft_options import DraftOptions, plan_for
from app.options import make_parser
from app.plan_file import DraftPlan, write_plan
from app.request import Request
from app.writer import Drafting, Writer
from benchmark.off_grid import own_texts
from decoding.policies import FixedLength
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Rule
from model import Decoder, LayerPlan
from model.fast import accelerate
from search.texts import Continuation
from tests.calls import recorded
from weights import memory
from weights.importance import PROMPTS
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

pytest.importorskip("numba", reason="low bits are fast with numba only: pip install numba")
FOLDER = model_folder("tiny-llama")
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.fixture
def model() -> Decoder:
    return accelerate(load_model(FOLDER))


@pytest.fixture(scope="module")
def few(tokenizer: Tokenizer) -> list[Continuation]:
    return own_texts(accelerate(load_model(FOLDER)), tokenizer, GREEDY, prompts=PROMPTS[:2])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan_of(model: Decoder, bits: int = 4) -> LayerPlan:
    return LayerPlan.full(model.num_layers).in_bits(bits)


def test_lowbit_drafts_in_four_bits_or_in_those_asked_for(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    setting = Setting(FOLDER, model, tokenizer, GREEDY, 64)
    for bits, wanted in ((None, 4), (8, 8)):
        drafting = setting.drafting(DraftOptions("lowbit", bits=bits), GREEDY)
        assert {*drafting.plan.attention, *drafting.plan.mlp} == {wanted}
        assert drafting.new_policy().gamma == 5


@pytest.mark.parametrize(("kernels", "head"), [((4,), 4), ((4, 8), 8), ((), 8)])
def test_a_low_bit_drafts_head_has_bits_with_a_kernel(
    kernels: tuple[int, ...],
    head: int,
    model: Decoder,
    tokenizer: Tokenizer,
) -> None:
    """A GPU has a kernel for four bits only."""
    model.fast_bits = kernels
    setting = Setting(FOLDER, model, tokenizer, GREEDY, 64)
    for kind in ("lowbit", "auto") if kernels else ("lowbit",):
        assert setting.drafting(DraftOptions(kind), GREEDY).plan.head == head


def test_auto_takes_four_bits_and_a_plan_only_if_their_copies_fit(
    tmp_path: Path, model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_bits = plan_for(DraftOptions("lowbit"), tmp_path, model.num_layers)
    plan = LayerPlan.full(model.num_layers).in_bits(8)
    write_plan(tmp_path / "plan.json", DraftPlan(plan, 3), "", {})
    setting = Setting(tmp_path, model, tokenizer, GREEDY, 64)
    four_bits = memory.low_bit_bytes(model.config, low_bits.plan)
    eight_bits = memory.low_bit_bytes(model.config, plan)
    rounding = 6 * model.config.vocab_size * model.config.hidden_size
    eight = eight_bits + rounding + 1
    for free, ways in [(1, 1), (eight, 2), (four_bits + eight, 3)]:
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        drafting = auto(DraftOptions("auto"), setting)
        assert len(drafting.name.split("; ")) == ways


@pytest.mark.parametrize("kind", ["lookup", "lowbit", "auto"])
def test_a_models_folder_may_be_read_only_and_stays_as_it_is(
    tmp_path: Path, kind: str, model: Decoder, tokenizer: Tokenizer
) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    folder.chmod(0o555)
    setting = Setting(folder, model, tokenizer, GREEDY, 64)
    setting.drafting(DraftOptions(kind), GREEDY).preparation.work()
    folder.chmod(0o755)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_the_first_slope_grows_with_the_bytes_that_a_draft_reads(model: Decoder) -> None:
    full = LayerPlan.full(model.num_layers)
    plans = {"4": full.in_bits(4), "8": full.in_bits(8), "16": full}
    known, *drafted = first_slopes(model, plans).values()
    assert drafted == sorted(drafted) and drafted[-1] == pytest.approx(1 + known)
    assert VERIFY_SLOPE < known < 0.15


def drafting_and_writer(model: Decoder, tokenizer: Tokenizer) -> tuple[Drafting, Writer]:
    """Of ``auto`` without a shipped plan, on a folder whose copies are not kept yet."""
    setting = Setting(FOLDER, model, tokenizer, GREEDY, 200)
    drafting = setting.drafting(DraftOptions("auto"), GREEDY)
    writer = Writer(model, 200, tokenizer.token_bytes)
    writer.begin(tokenizer.encode("Once upon a time"))
    return drafting, writer


def test_a_text_that_no_draft_can_change_begins_before_the_copies_are_made(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little of the work is done between two rounds."""
    drafting, writer = drafting_and_writer(model, tokenizer)
    assert not drafting.preparation.is_done
    policy = drafting.new_policy()
    offers = recorded(monkeypatch, policy, "choose", lambda found: {each.name for each in found})

    def write(way: Drafting) -> list[int]:
        text = writer.new_text(Rules(150))
        return writer.write(text, way, GREEDY, Coupling("race", 0)).tokens

    watched = replace(drafting, new_policy=lambda: policy)
    first = write(watched)
    assert "low bits" not in offers[0]
    drafting.preparation.work()
    assert first == write(watched) == write(writer.plain)
    assert "low bits" in offers[-1]


def test_without_drafts_no_copies_are_made(model: Decoder, tokenizer: Tokenizer) -> None:
    setting = Setting(FOLDER, model, tokenizer, GREEDY, 64)
    ways = [
        setting.drafting(DraftOptions("lowbit", gamma=0, adaptive=adaptive), GREEDY)
        for adaptive in (None, True)
    ]
    assert [way.new_policy().gamma for way in ways] == [0, 0]
    assert ways[0].plan is None and ways[0].new_drafter is ways[1].new_drafter
    assert not model.low_bits


def test_a_text_under_the_ratio_rule_waits_for_the_copies(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text after Ctrl-C too."""
    drafting, writer = drafting_and_writer(model, tokenizer)
    how = drafting, SamplingParams(1.0), Coupling("ratio", 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model, "make_copy", Mock(side_effect=KeyboardInterrupt))
        writer.write(writer.new_text(Rules(2)), *how)
    assert not drafting.preparation.is_done
    writer.write(writer.new_text(Rules(2)), *how)
    assert drafting.preparation.is_done and not model.missing_copies(drafting.plan)


@pytest.mark.parametrize(
    ("temperature", "rule", "granted"),
    [(0.0, "ratio", True), (1.0, "race", True), (1.0, "ratio", False)],
)
def test_the_clock_is_granted_where_no_draft_length_can_change_a_text(
    model: Decoder, tokenizer: Tokenizer, temperature: float, rule: str, granted: bool
) -> None:
    for target, rows_vary in ((model, False), (load_model(FOLDER), True)):
        writer = Writer(target, 64, tokenizer.token_bytes)
        writer.begin(tokenizer.encode("Once upon a time"))
        policy = FixedLength(4)
        policy.grant_clock = Mock()
        way = replace(writer.plain, new_policy=lambda policy=policy: policy)
        params = SamplingParams(temperature)
        writer.write(writer.new_text(Rules(4)), way, params, Coupling(rule, 0))
        assert policy.grant_clock.called is (granted and not rows_vary)


def test_a_draft_of_auto_is_verified_in_eight_rows_and_ends_by_confidence_on_a_cpu(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    setting = Setting(FOLDER, model, tokenizer, GREEDY, 64)
    policy = setting.drafting(DraftOptions("auto"), GREEDY).new_policy()
    assert policy.gamma + 1 == 8 and policy.reads_draft_confidence


def test_auto_needs_no_memory_for_the_low_bit_copies_of_its_plan(tmp_path: Path) -> None:
    """They are made only if they fit."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"bits": 8}')
    command = ["--model", "tiny-llama", "--dry-run", "--plan", str(plan), "--draft"]
    parser = make_parser()
    requests = [Request(parser.parse_args([*command, kind])) for kind in ("skip", "auto")]
    assert [bool(request.memory().low_bit_copies) for request in requests] == [True, False]
    assert requests[1].optional_copies()
