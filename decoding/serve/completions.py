"""Completions in OpenAI's JSON: whole, or in chunks while the text is written."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any

from decoding.rounds import Round
from decoding.run.chooser import Drafting
from decoding.serve.requests import Chat
from decoding.serve.worker import Job, Worker
from decoding.show.report import as_json
from decoding.show.streaming import TextStream

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}  # finish reasons in OpenAI's words
SHOWN = ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round", "tokens_per_second", "repeat_with")


def write_completion(job: Job, worker: Worker, drafting: Drafting) -> None:
    """Write the texts of a request to an endpoint of OpenAI's, with statistics of its rounds beside each.

    After each round a stream has sent the text that a terminal would show.
    """
    request, asked, tokens = job.request, job.request.asked, 0
    is_chat, with_usage = isinstance(asked, Chat), asked.stream_options.get("include_usage", False)
    prefix, kind = ("chatcmpl-", "chat.completion") if is_chat else ("cmpl-", "text_completion")
    kind += ".chunk" if is_chat and asked.stream else ""
    head = {"id": prefix + secrets.token_hex(12), "object": kind, "created": int(time.time()), "model": worker.name}
    choices: list[dict[str, Any]] = []

    def send_chunk(index: int, delta: dict[str, str], **end: Any) -> None:
        said = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": None, **end}
        job.send({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    for index in range(request.samples):
        text = worker.writer.new_text(request.options.rules)
        stream = TextStream(text)

        def read(round: Round, seconds: float, index: int = index, stream: TextStream = stream) -> None:
            job.check()
            if asked.stream and (piece := stream.pull()):
                send_chunk(index, {"content": piece})

        if asked.stream and is_chat:
            send_chunk(index, {"role": "assistant", "content": ""})
        coupling = replace(request.options.coupling, sample=index)
        sample = worker.writer.write(text, drafting, request.options.params, coupling, readers=[read])
        facts = as_json(sample, str(coupling) if request.options.params.temperature else "")
        tokens += len(facts["tokens"])
        end = {"finish_reason": FINISH[sample.finish], "speculation": {name: facts[name] for name in SHOWN}}
        if asked.stream:
            send_chunk(index, {}, **end)
        else:
            said = {"message": {"role": "assistant", "content": facts["text"]}} if is_chat else {"text": facts["text"]}
            choices.append({"index": index, **said, "logprobs": None, **end})
    prompt = len(request.ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    if with_usage or not asked.stream:
        job.send({**head, "choices": choices, "usage": usage})
    if asked.stream:
        job.send("[DONE]")
