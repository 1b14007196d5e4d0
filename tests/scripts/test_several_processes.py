"""``generate.py`` as torchrun starts it: the text of one process, told once; and whatever goes
wrong, in one line.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import generate
from tests.commands import Outcome, Run
from tests.folders import GEMMA2, LLAMA, write_folder
from tests.ranks import PATIENCE, run_all, started

LONG = ["--max-new-tokens", str(1 << 16), "--draft", "none"]


def main_in(place: tuple[Path, list[str]]) -> int:
    os.chdir(place[0])
    return generate.main(place[1])


def command(folder: Path, *options: object) -> list[str]:
    given = "the hen and the fox and the hen", "--model", folder, "--device", "cpu", *options
    return [*map(str, given)]


def complaints(ended: list[Outcome]) -> str:
    """The one line that all of them said together, where none did its work."""
    assert {process.status for process in ended} == {2}
    out, err = (
        "".join(said) for said in zip(*((each.out, each.err) for each in ended), strict=True)
    )
    return Outcome(2, out, err).complaint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("llama"), {**LLAMA, "max_position_embeddings": 1 << 17}
    )


OPTIONS = {
    "greedy, with a stop and a ban": ["--stop", "q", "--ban", "e", "--draft", "lookup"],
    "auto, drawn": ["--temperature", "0.9", "--seed", "5", "--num-samples", "2"],
    "a draft model": ["--draft", "model", "--draft-model", "ITSELF", "--gamma", "2"],
    "a plan": [
        "--draft",
        "exit",
        "--adaptive",
        "--temperature",
        "1",
        "--seed",
        "1",
        "--coupling",
        "ratio",
    ],
}


SILENT = Outcome(0, "", "")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_processes_write_the_texts_of_one_and_the_first_alone_speaks(
    tmp_path: Path, run: Run, options: list[str]
) -> None:
    folder = write_folder(tmp_path / "gemma2", GEMMA2)
    options = [str(folder) if option == "ITSELF" else option for option in options]
    shared = command(folder, "--dtype", "float64", "--max-new-tokens", 16, "--json", *options)
    first, other = run_all(generate.main, [shared] * 2)
    alone = run(*shared)
    assert first.status == alone.status == 0 and "tokens/s" in first.err
    assert [each["tokens"] for each in first.objects] == [each["tokens"] for each in alone.objects]
    assert other == SILENT


def test_a_dry_run_says_what_each_process_would_hold(folder: Path) -> None:
    first, *others = run_all(generate.main, [command(folder, "--dry-run")] * 4)
    assert others == [SILENT] * 3 and first.status == 0
    held = "weights: .+, KV cache at .+, workspace: .+, total: .+, free: .+"
    lines = "".join(f"process {rank} of 4: {held}\n" for rank in range(4))
    assert re.fullmatch(lines, first.out)


def test_ctrl_c_ends_all_of_them_after_what_was_written(folder: Path) -> None:
    """Each gets the signal from the terminal, and again from torchrun."""
    with started(generate.main, [command(folder, *LONG, "--json")] * 2) as processes:
        processes[0].wait_for("\ufffd", "err")  # bytes of a random model
        for _ in range(2):
            for process in processes:
                process.signal(signal.SIGINT)
        first, second = (process.ended() for process in processes)
    assert (first.status, second) == (130, Outcome(130, "", ""))
    assert first.objects[0]["tokens"] and "Traceback" not in first.err


@pytest.mark.parametrize("dies", [0, 2])
def test_a_process_that_dies_ends_the_others_which_the_first_says_in_one_line(
    folder: Path, dies: int
) -> None:
    config = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}
    config |= {"max_position_embeddings": 1 << 17}
    three = write_folder(folder.parent / "three", config)
    with started(generate.main, [command(three, *LONG)] * 3) as processes:
        processes[0].wait_for("\ufffd")
        processes[dies].signal(signal.SIGKILL)
        ended = [process.ended() for process in processes]
    assert [process.status for process in ended] == [-9 if rank == dies else 2 for rank in range(3)]
    # After the statistics of the text so far, if any; torchrun tells of the first rank.
    said = "".join(process.err for process in ended).splitlines()
    told = [line for line in said if line.startswith("error: one of the processes that share")]
    assert told == (said[-1:] if dies else [])


@pytest.mark.prove
@pytest.mark.parametrize("dies", ["0", "1"])
def test_under_torchrun_itself_all_end_with_a_process_that_dies(folder: Path, dies: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", generate.__file__, *command(folder, *LONG)]
    with subprocess.Popen(torchrun, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdout.read(1) and agent.stderr  # the text has begun
        for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
            if f"\0RANK={dies}\0" in Path(f"/proc/{child}/environ").read_text():
                os.kill(int(child), signal.SIGKILL)
        said = agent.communicate(timeout=PATIENCE)[1].decode()
    assert agent.returncode and "SIGKILL" in said


BAD: dict[str, tuple[list[str], str]] = {
    "no such option": (["--drafts"], "unrecognized arguments: --drafts"),
    "low bits": (["--draft", "lowbit"], "several processes draft without low bits"),
    "a server": (["--serve", "0"], "--svg run in one process"),
}


@pytest.mark.parametrize(("options", "said"), BAD.values(), ids=BAD)
def test_what_cannot_be_served_is_said_once(folder: Path, options: list[str], said: str) -> None:
    assert said in complaints(run_all(generate.main, [command(folder, *options)] * 2))


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "x"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "x"},
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=str,
)
def test_an_environment_that_is_not_torchruns_is_one_line(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        generate.main(["the"])
    said = capsys.readouterr().err
    assert said.startswith("error: RANK, WORLD_SIZE, ") and said.count("\n") == 1


def test_the_options_and_the_prompt_are_those_of_the_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("the hen and the fox and the hen")
    shared = ["--prompt-file", "prompt", "--model", str(folder), "--device", "cpu", "--json"]
    first = [*shared, "--max-new-tokens", "4", "--temperature", "1"]
    places = [(tmp_path, first), (folder, [*shared, "--max-new-tokens", "9"])]
    first, other = run_all(main_in, places)
    assert len(first.result["tokens"]) == 4 and other == SILENT


def test_different_and_missing_and_damaged_folders_are_refused_once(tmp_path: Path) -> None:
    for name in ("whole", "different", "missing", "damaged"):
        write_folder(tmp_path / name / "model", seed=int(name == "different"))
    (tmp_path / "missing/model/config.json").unlink()
    os.truncate(tmp_path / "damaged/model/model.safetensors", 1000)
    for name, said in (
        ("different", "its model or prompt differs from process 0's"),
        ("missing", "with a config.json"),
        ("damaged", "not a whole"),
    ):
        places = [(tmp_path / place, command(Path("model"))) for place in ("whole", name)]
        told = complaints(run_all(main_in, places))
        assert told.startswith("error: process 1: ") and said in told
