"""Several processes that share a model: forked from a server that has torch loaded, so that each takes moments."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from model import Decoder, build, parse_config
from model.leader import ParallelDecoder, follow
from model.parallel import Share, split

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["tests.ranks", "generate"])
PATIENCE = 60  # seconds, after which a test fails that should take one or two


class Ended(NamedTuple):
    """How a process ended, and what it said."""

    status: int | None
    out: str
    err: str


class Process:
    """One of several processes that torchrun might have started."""

    def __init__(self, work: Callable[..., int], argument: Any, environment: dict[str, Any], place: Path) -> None:
        self.place = place
        self.process = SERVER.Process(target=live, args=(work, argument, environment, place), daemon=True)
        self.process.start()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def said(self, stream: str) -> str:
        """What it has written so far to "out" or "err"."""
        file = self.place.with_suffix(f".{stream}")
        return file.read_text() if file.exists() else ""

    def wait_for(self, words: str, stream: str = "out") -> None:
        """Until it has written this."""
        began = time.monotonic()
        while words not in self.said(stream):
            assert time.monotonic() < began + PATIENCE and self.process.is_alive(), self.said("err")
            time.sleep(0.01)

    def ended(self) -> Ended:
        """Wait for its end."""
        self.process.join(PATIENCE)
        return Ended(self.process.exitcode, self.said("out"), self.said("err"))


def live(work: Callable[..., int], argument: Any, environment: dict[str, Any], place: Path) -> None:
    """The life of a process."""
    os.environ |= {name: str(value) for name, value in environment.items()}
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(place.with_suffix(f".{stream}"), os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    sys.exit(work(argument))


@contextmanager
def started(work: Callable[..., int], arguments: Sequence[Any]) -> Iterator[list[Process]]:
    """Processes that do ``work`` on an argument each, as torchrun would start them; those still there are killed."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # it outlives them all
        shared = {"WORLD_SIZE": len(arguments), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {
            "LOCAL_WORLD_SIZE": len(arguments),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        processes = [
            Process(work, argument, {**shared, "RANK": rank, "LOCAL_RANK": rank}, Path(folder, str(rank)))
            for rank, argument in enumerate(arguments)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.process.kill()
                process.process.join()
            del kept


def run(work: Callable[..., int], arguments: Sequence[Any]) -> list[Ended]:
    """Start them and wait for all."""
    with started(work, arguments) as processes:
        return [process.ended() for process in processes]


def part_of(model: Decoder, share: Share) -> Decoder:
    """What a process holds of a model that is whole in memory."""
    mine = split(build(share.local), share).to(model.dtype)
    state = {}
    for name, parameter in model.named_parameters():
        cut = share.cut(name)
        state[name] = parameter if cut is None else parameter.narrow(cut[0], cut[1].start, len(cut[1]))
    mine.load_state_dict(state)
    return mine.requires_grad_(False).eval()


def random_model(config: dict[str, Any]) -> Decoder:
    """A whole model in float64, the same in every process."""
    model = build(parse_config(config)).double()
    model.initialise(std=0.5, generator=torch.Generator().manual_seed(1))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    return model.requires_grad_(False).eval()


def follow_many(meeting: tuple[str, int, int]) -> int:
    """A follower's life: its share of one model after another, until there is none."""
    place, rank, size = meeting
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
    while True:
        said: list[Any] = [None]
        dist.broadcast_object_list(said, 0)
        if said[0] is None:
            return 0
        model = random_model(said[0])
        share = Share(model.config, rank, size)
        follow(part_of(model, share), share)


class Leader:
    """This process, as the first of ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    @contextmanager
    def shared(self, config: dict[str, Any]) -> Iterator[tuple[Decoder, ParallelDecoder]]:
        """``random_model``, whole and shared."""
        whole = random_model(config)
        share = Share(whole.config, 0, self.size)
        dist.broadcast_object_list([config], 0)
        shared = ParallelDecoder(part_of(whole, share), share)
        try:
            yield whole, shared
        finally:
            shared.end()


@contextmanager
def leading(size: int, place: Path) -> Iterator[Leader]:
    """Lead followers that serve any number of models; they meet at a file."""
    with started(follow_many, [(str(place), rank, size) for rank in range(1, size)]):
        patience = timedelta(seconds=PATIENCE)
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=size, timeout=patience)
        try:
            yield Leader(size)
            dist.broadcast_object_list([None], 0)
        finally:
            dist.destroy_process_group()
