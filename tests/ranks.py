"""Several processes that share a model: forked from a server that has torch loaded, so that each
takes moments.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.decoder import Decoder
from model.parallel import Shard, split
from tests.calls import until
from tests.commands import Outcome
from tests.laws import random_model

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["tests.ranks", "generate", "app.processes"])
PATIENCE = 60  # seconds, after which a test fails that should take one or two


class Process:
    """One of several processes that torchrun might have started."""

    def __init__(
        self, work: Callable[..., int], argument: Any, environment: dict[str, Any], place: Path
    ) -> None:
        self.place = place
        self.process = SERVER.Process(
            target=live, args=(work, argument, environment, place), daemon=True
        )
        self.process.start()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def said(self, stream: str) -> str:
        """Its output so far to "out" or "err"."""
        file = self.place.with_suffix(f".{stream}")
        return file.read_text() if file.exists() else ""

    def wait_for(self, words: str, stream: str = "out") -> None:
        """Until it has written this."""
        until(lambda: words in self.said(stream) or not self.process.is_alive())
        assert words in self.said(stream), self.said("err")

    def ended(self) -> Outcome:
        """Wait for its end."""
        self.process.join(PATIENCE)
        return Outcome(self.process.exitcode, self.said("out"), self.said("err"))


def live(work: Callable[..., int], argument: Any, environment: dict[str, Any], place: Path) -> None:
    """Run ``work`` in a new process, its streams written to files."""
    os.environ |= {name: str(value) for name, value in environment.items()}
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(place.with_suffix(f".{stream}"), os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    sys.exit(work(argument))


@contextmanager
def started(work: Callable[..., int], arguments: Sequence[Any]) -> Iterator[list[Process]]:
    """Processes that do ``work`` on an argument each, as torchrun would start them; those still
    there are killed.
    """
    # the meeting place of the processes, which outlives them
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": len(arguments),
        "LOCAL_WORLD_SIZE": len(arguments),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            Process(
                work,
                argument,
                {**shared, "RANK": rank, "LOCAL_RANK": rank},
                Path(folder, f"{rank}"),
            )
            for rank, argument in enumerate(arguments)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.process.kill()
                process.process.join()


def run_all(work: Callable[..., int], arguments: Sequence[Any]) -> list[Outcome]:
    """Start them and wait for all."""
    with started(work, arguments) as processes:
        return [process.ended() for process in processes]


def split_model(config: dict[str, Any]) -> Decoder:
    """This rank's part of ``random_model``."""
    model = random_model(config)
    shard = Shard(model.config, dist.get_rank(), dist.get_world_size())
    part = Decoder(shard.local).to(model.dtype).requires_grad_(False).eval()
    part.load_state_dict(
        {name: part_of(each, shard.cut(name)) for name, each in model.named_parameters()}
    )
    return split(part, shard)


def part_of(parameter: torch.Tensor, cut: tuple[int, range] | None) -> torch.Tensor:
    """A rank's shard of a parameter."""
    return parameter if cut is None else parameter.narrow(cut[0], cut[1].start, len(cut[1]))


def on_ranks(size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks of a process group."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(rank)) for rank in range(size)]
        for ended in run_all(save_result, [(place, work, given) for place in places]):
            assert ended.status == 0, ended.err
        return [torch.load(place) for place in places]


def save_result(asked: tuple[Path, Callable[..., Any], tuple[Any, ...]]) -> int:
    """Do the work as one rank; its result goes into a file."""
    place, work, given = asked
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    torch.save(work(*given), place)
    return 0
