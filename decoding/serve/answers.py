"""Answers of the server: the texts of a job, and the messages about them, for OpenAI's endpoints
and for the live page.
"""

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoding.rounds import Round
from decoding.run.chooser import DraftOptions
from decoding.run.session import Session
from decoding.run.streaming import TextStream
from decoding.run.writer import Task
from decoding.serve.requests import ChatBody, RequestReader
from decoding.serve.worker import Job
from decoding.show.output import as_json
from decoding.show.page import Recording, heading, render_page

# the elements that the live page has besides those of --html
FORM = Path(__file__).with_name("live.html")


def completion(job: Job, session: Session) -> Iterator[Task]:
    """Answer of OpenAI's endpoints, with statistics of the rounds: the whole text in one message
    or, of a stream, the text that a terminal would show, after each round.
    """
    body, ids, answers, options = job.request
    is_chat = isinstance(body, ChatBody)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {
        "id": secrets.token_hex(12),
        "object": f"{kind}.chunk" if is_chat and body.stream else kind,
        "created": int(time.time()),
        "model": session.request.name,
    }
    task = session.task(ids, options, answers=answers)
    stream = TextStream(task.text)

    def answer(said: dict[str, str], finish: str | None = None, **more: Any) -> dict[str, Any]:
        shown: dict[str, Any] = {"text": said.get("content", "")}
        if is_chat:
            shown = {"delta" if body.stream else "message": said}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": finish, **more}
        return {**head, "choices": [choice]}

    def read(round: Round, seconds: float) -> None:
        if body.stream and (piece := stream.pull()):
            job.send(answer({"content": piece}))

    task.readers = [read]
    if body.stream and is_chat:
        job.send(answer({"role": "assistant", "content": ""}))
    yield task
    finish = "length" if task.text.finish == "length" else "stop"
    statistics = as_json(task.sample, str(task.coupling) if task.params.temperature else "")
    usage = {
        "prompt_tokens": task.text.prompt_length,
        "completion_tokens": len(task.text.generated),
        "total_tokens": len(task.text),
    }
    if not body.stream:
        said = {"role": "assistant", "content": task.text.written}
        job.send(answer(said, finish, speculation=statistics) | {"usage": usage})
        return
    job.send(answer({}, finish, speculation=statistics))
    if (body.stream_options or {}).get("include_usage"):
        job.send({**head, "choices": [], "usage": usage})
    job.send("[DONE]")


def live(job: Job, session: Session) -> Iterator[Task]:
    """Answer of the live page: a column with the text and, if asked, one with its plain text."""
    body, ids, answers, options = job.request
    drafts = [options.draft, DraftOptions("none")] if body.beside else [options.draft]
    tasks = [session.task(ids, options._replace(draft=draft), answers=answers) for draft in drafts]
    first = tasks[0].drafting
    facts = heading("", session.request.name, first, options.params, options.coupling)
    job.send({"kind": "begin", "columns": [task.drafting.name for task in tasks], **facts})
    for number, task in enumerate(tasks):
        show_in_column(job, session, task, number)
        yield task


def show_in_column(job: Job, session: Session, task: Task, number: int) -> None:
    """Tell the page each draft of a text and, verified, each round."""
    recording = Recording(task.params, session.labels)

    def send(kind: str, **more: Any) -> None:
        job.send({"kind": kind, "column": number, **more})

    def read(round: Round, seconds: float) -> None:
        data = recording.add(round, seconds)
        send("round", round=data, finish=round.finish, seconds=seconds)

    task.readers = [read]
    task.observer = recording.observe
    task.on_draft = lambda tokens: send("draft", tokens=[*map(session.labels, tokens)])


def live_page(reader: RequestReader) -> str:
    """The page before anything is written."""
    options = reader.options
    facts = {
        "prompt": "",
        "facts": [("Model", reader.command_line.name)],
        "plan": None,
        "greedy": True,
        "race": False,
        "form": {
            "drafts": reader.drafts,
            "draft": options.draft,
            "temperature": options.temperature,
            "seed": options.seed,
            "max_tokens": options.max_new_tokens,
        },
    }
    nothing = {"rounds": [], "finish": None, "seconds": 0}
    return render_page(facts, [nothing], FORM.read_text(encoding="utf-8"))
