"""``generate.py`` as torchrun starts it: the text of one process, told once; and whatever goes
wrong, in one line.
"""

import os
import signal
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest

import generate
from app.processes import SharedSession
from decoding.randomness import SeededRandomness
from decoding.verify import Rule
from tests.commands import Outcome, Run
from tests.folders import LLAMA, write_folder
from tests.ranks import run_all, started

EXACT = ["--dtype", "float64", "--max-new-tokens", "16", "--json"]
LONG = ["--max-new-tokens", str(1 << 16), "--draft", "none"]


def main_in(place: tuple[Path, list[str]]) -> int:
    os.chdir(place[0])
    return generate.main(place[1])


def command(folder: Path, *options: object) -> list[str]:
    return [
        "the hen and the fox and the hen",
        "--model",
        str(folder),
        "--device",
        "cpu",
        *map(str, options),
    ]


def complaint(ended: list[Outcome]) -> str:
    """The one line that all of them said together, where none did its work."""
    assert {process.status for process in ended} == {2}
    said = ("".join(getattr(each, stream) for each in ended) for stream in ("out", "err"))
    return Outcome(2, *said).complaint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads divide over two and three processes, and whose texts may be long."""
    return write_folder(
        tmp_path_factory.mktemp("llama"),
        {
            **LLAMA,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "max_position_embeddings": 1 << 17,
        },
    )


TEXTS = {
    "greedy, with a stop and a ban": "--stop q --ban e --draft lookup --compare",
    "auto, drawn": "--temperature 0.9 --seed 5 --num-samples 2",
    "a draft model": "--draft model --draft-model {folder} --gamma 2",
    "low bits, drawn": "--draft lowbit --temperature 0.9 --seed 5",
    "an exit, by the ratio rule": "--draft exit --adaptive --temperature 1 --seed 1"
    " --coupling ratio",
}


@pytest.mark.parametrize("options", TEXTS.values(), ids=TEXTS)
def test_two_processes_write_the_texts_of_one_and_the_first_alone_speaks(
    folder: Path, run: Run, options: str
) -> None:
    shared = command(folder, *EXACT, *options.format(folder=folder).split())
    first, other = run_all(generate.main, [shared] * 2)
    alone = run(*shared)
    assert first.status == alone.status == 0 and "tokens/s" in first.err
    assert [each["tokens"] for each in first.objects] == [each["tokens"] for each in alone.objects]
    assert all(each["drafted"] for each in first.objects) and other == Outcome(0, "", "")


def test_the_options_the_prompt_and_the_seed_are_those_of_the_first(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("the hen and")
    shared = command(folder, "--json", "--temperature", 1, "--prompt-file", "prompt")[1:]
    places = [(tmp_path, [*shared, "--max-new-tokens", "4"]), (folder, shared)]
    first, other = run_all(main_in, places)
    assert len(first.result["tokens"]) == 4 and other == Outcome(0, "", "")


def test_ctrl_c_ends_all_of_them_after_what_was_written(folder: Path) -> None:
    """Each gets the signal from the terminal, and again from torchrun."""
    with started(generate.main, [command(folder, *LONG, "--json")] * 2) as processes:
        processes[0].wait_for("\ufffd", "err")  # bytes of a random model
        for process in processes * 2:
            process.signal(signal.SIGINT)
        first, second = (process.ended() for process in processes)
    assert (first.status, second) == (130, Outcome(130, "", ""))
    assert first.objects[0]["tokens"] and "Traceback" not in first.err


@pytest.mark.parametrize("dies", [0, 2])
def test_a_process_that_dies_ends_the_others_which_the_first_says_in_one_line(
    folder: Path, dies: int
) -> None:
    with started(generate.main, [command(folder, *LONG)] * 3) as processes:
        processes[0].wait_for("\ufffd")
        processes[dies].signal(signal.SIGKILL)
        ended = [process.ended() for process in processes]
    assert [process.status for process in ended] == [-9 if rank == dies else 2 for rank in range(3)]
    # After the statistics of the text so far, if any; torchrun tells of the first rank.
    said = "".join(process.err for process in ended).splitlines()
    told = [line for line in said if line.startswith("error: one of the processes that share")]
    assert told == (said[-1:] if dies else [])


def rounding_otherwise(arguments: list[str]) -> int:
    """Run the command, on each rank with other random numbers."""
    Rule.randomness = lambda rule, device: SeededRandomness(int(os.environ["RANK"]), device)
    return generate.main(arguments)


def test_processes_that_choose_different_tokens_end_with_one_line(folder: Path) -> None:
    """Other random numbers stand for hardware that rounds differently."""
    drawn = command(folder, *EXACT, "--draft", "none", "--temperature", 1, "--coupling", "ratio")
    first, other = run_all(rounding_otherwise, [drawn] * 2)
    assert first.err.splitlines()[-1].startswith("error: the processes disagree")
    assert other == Outcome(2, "", "")


BAD = {
    "--drafts": "unrecognized arguments: --drafts",
    "--draft model --draft-model no-such": "no folder 'no-such' with a config.json",
    "--serve 0": "prompt has no effect with --serve",
    "--dry-run": "--serve, --interactive and --dry-run run in one process",
    "--prompt-file no-such": "give one prompt",
}


@pytest.mark.parametrize(("options", "said"), BAD.items(), ids=BAD)
def test_what_cannot_be_served_is_said_once(folder: Path, options: str, said: str) -> None:
    assert said in complaint(run_all(generate.main, [command(folder, *options.split())] * 2))


DAMAGED = {
    "its model differs from process 0's": lambda folder: write_folder(folder, seed=1),
    "with a config.json": lambda folder: (folder / "config.json").unlink(),
    "not a whole": lambda folder: os.truncate(folder / "model.safetensors", 1000),
}


@pytest.mark.parametrize(("said", "damage"), DAMAGED.items(), ids=DAMAGED)
def test_a_different_or_missing_or_damaged_folder_is_refused_once(
    tmp_path: Path, said: str, damage: Callable[[Path], object]
) -> None:
    places = [tmp_path / "whole", tmp_path / "other"]
    for place in places:
        write_folder(place / "model")
    damage(places[1] / "model")
    told = complaint(run_all(main_in, [(place, command(Path("model"))) for place in places]))
    assert told.startswith("error: process 1: ") and said in told


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "x"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "x"},
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
    ],
    ids=str,
)
def test_an_environment_that_is_not_torchruns_is_one_line(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    monkeypatch.setattr(os, "_exit", sys.exit)
    assert run("the").complaint.startswith("error: RANK, WORLD_SIZE, ")


def test_a_rank_writes_with_the_arguments_of_a_process_alone() -> None:
    assert (
        signature(SharedSession.rounds).parameters.keys()
        == signature(generate.Session.rounds).parameters.keys()
    )
