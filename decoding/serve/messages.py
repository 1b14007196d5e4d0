"""Messages to clients: completions in OpenAI's JSON, and the parts of the live page, while texts are written."""

import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from decoding.policies import FixedLength
from decoding.rounds import Round
from decoding.run.chooser import DRAFTERS, Drafting
from decoding.run.together import Task
from decoding.sampling import SamplingParams
from decoding.serve.requests import Chat, RequestReader
from decoding.serve.worker import Job, Worker
from decoding.show.page import Recording, heading, render_page
from decoding.show.report import as_json
from decoding.show.streaming import TextStream

FORM = Path(__file__).with_name("live.html")  # the elements that the live page has besides those of --html
SHOWN = ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round", "tokens_per_second", "repeat_with")


class CompletionWriter:
    """Texts of a request to an endpoint of OpenAI's, sent to its client with statistics of the rounds beside each.

    After each round a stream has sent the text that a terminal would show.
    """

    def __init__(self, job: Job, worker: Worker, drafting: Drafting) -> None:
        """Submits the texts."""
        self.job, asked = job, job.asked
        self.is_chat, self.streams = isinstance(asked, Chat), bool(asked.stream)
        self.shows_usage = not asked.stream or (asked.stream_options or {}).get("include_usage")
        prefix, kind = ("chatcmpl-", "chat.completion") if self.is_chat else ("cmpl-", "text_completion")
        kind += ".chunk" if self.is_chat and asked.stream else ""
        self.head = {"id": prefix + secrets.token_hex(12), "object": kind, "created": int(time.time())}
        self.head["model"] = worker.name
        self.choices: dict[int, dict[str, Any]] = {}  # of texts that have ended, by their numbers
        self.samples = asked.n or 1
        for index in range(self.samples):
            task = worker.write(job, drafting, replace(job.options.coupling, sample=index))
            task.readers = [partial(self.read, index, task, TextStream(task.text))]
            if self.streams and self.is_chat:
                self.send([self.choice(index, role="assistant", content="")])

    def read(self, index: int, task: Task, stream: TextStream, round: Round, seconds: float) -> None:
        """Send the new part of a text; at its end its statistics, and at the end of all texts the usage."""
        if self.streams and (piece := stream.pull()):
            self.send([self.choice(index, content=piece)])
        if round.finish is None:
            return
        facts = as_json(task.sample, str(task.coupling) if task.params.temperature else "")
        said = {} if self.streams else {"role": "assistant", "content": facts["text"]}
        finish = "length" if round.finish == "length" else "stop"
        speculation = {name: facts[name] for name in SHOWN}
        self.choices[index] = self.choice(index, **said) | {"finish_reason": finish, "speculation": speculation}
        if self.streams:
            self.send([self.choices[index]])
        if len(self.choices) < self.samples:
            return
        prompt, output = len(self.job.ids), sum(len(task.text.generated) for task in self.job.tasks)
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        if self.shows_usage:
            self.send([] if self.streams else [self.choices[index] for index in sorted(self.choices)], usage=usage)
        if self.streams:
            self.job.send("[DONE]")

    def choice(self, index: int, **said: str) -> dict[str, Any]:
        """A text, or a piece of it."""
        shown = {"delta" if self.streams else "message": said} if self.is_chat else {"text": said.get("content", "")}
        return {"index": index, **shown, "logprobs": None, "finish_reason": None}

    def send(self, choices: list[dict[str, Any]], **usage: Any) -> None:
        self.job.send({**self.head, "choices": choices, **usage})


def live_page(reader: RequestReader) -> str:
    """The page before anything is written."""
    options = reader.options
    form = {"drafts": [*DRAFTERS], "draft": options.draft, "temperature": options.temperature}
    form |= {"seed": options.seed, "max_tokens": options.max_new_tokens}
    facts = {"prompt": "", "facts": [("Model", reader.name)], "plan": None, "greedy": True, "race": False}
    empty = Recording(FixedLength(0), SamplingParams(), str)
    return render_page({**facts, "form": form}, [empty], FORM.read_text(encoding="utf-8"))


def write_live(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Submit the text of the live page and, when it has ended, its plain text if asked.

    The page gets each draft before its verification, and each round after it.
    """
    _, params, _, coupling = job.options
    ways = [drafting, worker.plain] if job.asked.beside else [drafting]
    facts = heading("", worker.name, drafting, params, coupling)
    job.send({"kind": "begin", "columns": [way.name for way in ways], **facts})

    def write(column: int) -> None:
        policy = ways[column].new_policy()
        recording = Recording(policy, params, worker.labels, lambda part: job.send({**part, "column": column}))

        def read(round: Round, seconds: float) -> None:
            recording.add(round, seconds)
            if round.finish and column + 1 < len(ways):
                write(column + 1)

        seen = {"observer": recording.observe, "on_draft": recording.draft}
        worker.write(job, ways[column], coupling, policy=policy, readers=[read], **seen)

    write(0)
