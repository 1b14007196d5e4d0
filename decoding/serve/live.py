"""Live page: the page of --html with a form, and the messages that fill it while a text is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from decoding.drafters import Draft, Drafter
from decoding.run.chooser import Drafting
from decoding.serve.requests import RequestReader
from decoding.serve.worker import Job, Worker
from decoding.show.page import Heading, Recording, fill

FORM = Path(__file__).with_name("live.html")


def live_page(reader: RequestReader) -> str:
    """The page before anything is written."""
    options = reader.options
    form = {"drafts": reader.drafts, "draft": options.draft, "temperature": options.temperature}
    form |= {"seed": options.seed, "max_tokens": options.max_new_tokens}
    heading = Heading("", [("Model", reader.name)], None, greedy=True)
    sample = {"rounds": [], "finish": None, "seconds": 0}
    return fill({**asdict(heading), "samples": [sample], "labels": {}, "form": form}, FORM.read_text(encoding="utf-8"))


def write_live(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Write the text of the live page, and its plain text if asked. The page gets each part of a recording at once."""
    _, params, rules, coupling = job.request.options
    ways = [drafting, worker.writer.plain] if job.request.asked.beside else [drafting]
    heading = Heading.of("", worker.name, drafting, params, coupling)
    job.send({"kind": "begin", "columns": [way.name for way in ways], **asdict(heading)})
    for column, way in enumerate(ways):
        policy = way.new_policy()
        recording = Recording(policy, params, worker.labels, lambda part, at=column: job.send({**part, "column": at}))
        worker.writer.write(
            worker.writer.new_text(rules),
            way,
            params,
            coupling,
            policy=policy,
            readers=[recording.add],
            observer=recording.observe,
            drafter=shown_drafter(worker.writer.drafter(way), recording.draft),
        )


def shown_drafter(drafter: Drafter, show: Callable[[Draft], None]) -> Drafter:
    """The drafter, whose drafts are shown before they are verified."""

    def propose(*arguments: Any) -> Draft:
        draft = drafter.propose(*arguments)
        show(draft)
        return draft

    return SimpleNamespace(propose=propose, rollback=drafter.rollback)
