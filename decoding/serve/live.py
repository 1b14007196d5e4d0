"""Live page: the page of ``--html`` with a form, and the messages that fill it while a text is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decoding.drafters import Draft, Drafter
from decoding.policies import Policy
from decoding.randomness import Randomness
from decoding.run.chooser import Drafting
from decoding.sampling import SamplingParams
from decoding.serve.requests import RequestReader
from decoding.serve.worker import Job, Worker
from decoding.show.page import Heading, Recording, fill, heading_data
from decoding.show.report import sampling_in_words
from decoding.text import Text

FORM = Path(__file__).with_name("live.html")


def live_page(reader: RequestReader) -> str:
    """The page before anything is written."""
    options = reader.options
    form = {"drafts": reader.drafts, "draft": options.draft, "temperature": options.temperature}
    form |= {"seed": options.seed, "max_tokens": options.max_new_tokens}
    heading = heading_data(Heading("", [("Model", reader.name)], None, greedy=True))
    sample = {"rounds": [], "finish": None, "seconds": 0}
    return fill({**heading, "samples": [sample], "labels": {}, "form": form}, FORM.read_text(encoding="utf-8"))


def write_live(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Write the text of the live page, and plainly too if asked: the page gets the recording of each as it comes in."""
    _, params, rules, coupling = job.request.options
    drawn, ways = params.temperature > 0, [drafting]
    if job.request.asked.beside:
        ways.append(worker.writer.plain)
    sampling = sampling_in_words(params, str(coupling) if drawn else "")
    facts = [("Model", worker.name), ("Draft", drafting.name), ("Sampling", sampling)]
    heading = Heading("", facts, drafting.plan, greedy=not drawn, race=coupling.name == "race")
    job.send({"kind": "begin", "columns": [way.name for way in ways], **heading_data(heading)})
    for column, way in enumerate(ways):
        policy = way.new_policy()
        recording = Recording(policy, params, worker.labels, lambda part, at=column: job.send({**part, "column": at}))
        drafter = WatchedDrafter(worker.writer.drafter(way), recording.draft)
        watched = {"readers": [recording.add], "observer": recording.observe, "drafter": drafter}
        worker.write(job, worker.writer.new_text(rules), way, 0, policy=policy, **watched)


class WatchedDrafter:
    """A drafter whose every draft is shown before it is verified."""

    def __init__(self, drafter: Drafter, show: Callable[[Draft], None]) -> None:
        self.drafter, self.show = drafter, show

    def propose(self, text: Text, limit: int, params: SamplingParams, policy: Policy, randomness: Randomness) -> Draft:
        draft = self.drafter.propose(text, limit, params, policy, randomness)
        self.show(draft)
        return draft

    def rollback(self, length: int) -> None:
        self.drafter.rollback(length)
