"""Requests: pydantic models of their JSON bodies, and their reader.

The models here declare the fields of OpenAI's API, and check them. All others are options of the
command line, or are refused. Of options, ``merge_options`` checks the types, as in a call from
Python, and ``TextOptions`` the ranges.
"""

import json
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from starlette.exceptions import HTTPException

from cli.command_line import say
from cli.files import one_line
from decoding.run.chooser import DRAFTERS
from decoding.run.options import (
    Request,
    TextOptions,
    merge_options,
    prompt_ids,
    read_grammar_files,
    told_schema,
)
from decoding.run.prompt import Spans, check_prompt, conversation, too_long
from decoding.sampling import SamplingParams
from model import InputError
from weights.tokenizer import Tokenizer

MAX_GAMMA = 32
# Options of the command line that a request may give: those of Python, without files and folders.
SHARED = {field.name for field in fields(SamplingParams)} | {
    *("seed", "coupling", "stop", "ban", "schema_prompt"),
    *("draft", "exit_layer", "gamma", "adaptive", "min_target_confidence"),
}
# Longest sources in characters. Thousands of Lark rules that each name the next overflow the stack
# of llguidance, which ends the process.
MAX_SOURCE = {"json_schema": 1 << 16, "regex": 1 << 16, "grammar": 1 << 13}
MOST_SEARCHED = 1 << 13  # characters of stop or ban: each is searched for after each token
MASK_SECONDS = 1.0  # longest that the masks of a text may take in all
UNUSED = {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user"}
NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "modalities": ["text"],
    "tool_choice": "none",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
}
NOTHING = (None, "", [], {})


def refusal(error: BaseException) -> HTTPException:
    """The status and sentence for an error, with option ``--exit-layer`` as field ``exit_layer``.

    A failure such as exhausted memory is printed; the client is told no details.
    """
    match error:
        case HTTPException():
            return error
        case ValidationError():
            first = error.errors(include_url=False)[0]
            name = "".join(
                f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
            )[1:81]
            return HTTPException(400, f"{name or 'the body'}: {first['msg']}")
        case InputError() if not error.__cause__:  # of code of the server's user, it is no client's
            return HTTPException(
                400, re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
            )
    say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
    return HTTPException(500, "the request could not be answered")


def error_json(error: HTTPException) -> dict[str, Any]:
    """An error in OpenAI's JSON. Its ``param`` is the field at the beginning, if any."""
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    field = re.match(r"[\w-]*", error.detail)[0].replace("-", "_")
    known = {*LiveBody.model_fields, *ChatBody.model_fields, *SHARED}
    names_field = field in known or (field and f"{field} is not" in error.detail)
    return {
        "error": {
            "message": error.detail,
            "type": kind,
            "param": field if names_field else None,
            "code": None,
        }
    }


class TextPart(BaseModel):
    """Part of a message: text, the only kind that a model here reads."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Message of a chat. A ``content`` that is a string becomes a list of one part, and the role
    "developer" becomes "system".
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        list[TextPart],
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value
        ),
        Field(min_length=1),
    ]


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    def grammar(self) -> dict[str, str]:
        """The command line's option for it, if any. Raises HTTPException without a schema."""
        if self.type == "text":
            return {}
        given = (self.json_schema or {}).get("schema")
        schema = {"type": "object"} if self.type == "json_object" else given
        if not isinstance(schema, dict):
            raise HTTPException(400, "response_format.json_schema: give a schema")
        return {"json_schema": json.dumps(schema)}


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``. ``choice``: strings of which the text is one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    lark: str | None = Field(None, alias="grammar")

    def grammar(self) -> dict[str, str]:
        """The command line's options for it."""
        if len(self.model_dump(exclude_none=True)) > 1:
            raise HTTPException(
                400, "structured_outputs: give one of json, regex, choice and grammar"
            )
        schema = self.json_schema
        found = {
            "json_schema": json.dumps(schema) if isinstance(schema, dict) else schema,
            "regex": "|".join(map(re.escape, self.choice)) if self.choice else self.regex,
            "grammar": self.lark,
        }
        return {name: source for name, source in found.items() if source is not None}


class TextBody(BaseModel):
    """Fields of every request. Others are the command line's options, or have no effect here."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``."""

    prompt: str = Field(min_length=1)

    @property
    def texts(self) -> list[str]:
        """The texts that the prompt is made of."""
        return [self.prompt]

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> tuple[list[int], Spans]:
        """Token ids of the prompt as plain text, and the earlier answers in it: none."""
        return tokenizer.encode(self.prompt), ()


class LiveBody(CompletionBody):
    """JSON of the live page. ``beside``: write the text plainly as well."""

    stream: Literal[True] = True
    beside: bool = False

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> tuple[list[int], Spans]:
        """Token ids of the prompt, encoded as on the command line."""
        return prompt_ids(tokenizer, self.prompt, options), ()


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)

    @property
    def texts(self) -> list[str]:
        """The text of each message."""
        return ["".join(part.text for part in message.content) for message in self.messages]

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> tuple[list[int], Spans]:
        """Token ids of the messages, and the positions of the answers in them.

        Where they begin with no system message, the command line's stands before them.
        """
        if tokenizer.chat_template is None:
            raise HTTPException(400, "this model has no chat template: use /v1/completions")
        messages = [
            {"role": message.role, "content": text}
            for message, text in zip(self.messages, self.texts, strict=True)
        ]
        if options.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": options.system})
        return conversation(tokenizer, messages, told_schema(options))


class ParsedRequest(NamedTuple):
    """Request for a text, checked: its JSON, the token ids of its prompt, the positions of earlier
    answers in them, and its options with those of the command line where it gives none.
    """

    body: TextBody
    ids: list[int]
    answers: Spans
    options: TextOptions


class RequestReader:
    """Reader of requests for texts that fit the command line's context.

    Drafts by ``lowbit`` are in ``bits`` bits, since memory is counted for one copy of all weights.
    """

    def __init__(self, command_line: Request, bits: int) -> None:
        self.command_line = command_line
        self.options = read_grammar_files(command_line.options)
        self.bits = bits
        # Of prompts that could fit, since no token has more than the longest: to split more into
        # tokens would take seconds, in which nobody is answered.
        self.most_bytes = command_line.context * max(map(len, command_line.tokenizer.pieces))
        # Kinds of draft that a request may ask for: of the others a file was not given, or memory
        # is not counted for the copies of their two plans.
        has_plan = (command_line.folder / "plan.json").exists()
        absent = {"auto", "model"} if has_plan else {"auto", "model", "skip"}
        self.drafts = [kind for kind in DRAFTERS if kind not in absent - {self.options.draft}]

    def read(self, kind: type[TextBody], data: bytes) -> ParsedRequest:
        """The request with this body. Raises the errors that ``refusal`` takes."""
        command_line = self.command_line
        body = kind.model_validate_json(data)
        self.check_model(body.model or command_line.name)
        options = self.options_of(body)
        size = len("".join(body.texts).encode())
        if size > self.most_bytes:
            raise too_long(f"{size} bytes", command_line.config, command_line.context)
        ids, answers = body.encode(command_line.tokenizer, options)
        check_prompt(ids, command_line.config, Path(command_line.name), command_line.context)
        wanted = body.max_completion_tokens or body.max_tokens or options.max_new_tokens
        options.max_new_tokens = min(wanted, command_line.context - len(ids))
        return ParsedRequest(body, ids, answers, command_line.text_options(options, MASK_SECONDS))

    def options_of(self, body: TextBody) -> Namespace:
        """The command line's options, with those of a request in their place; those of drafting
        hold for the command line's kind of draft only.
        """
        known = self.options
        given = given_options(body)
        kind = given.get("draft", known.draft)
        if kind != known.draft:
            if kind not in self.drafts:
                raise HTTPException(
                    400, f"draft must be one of {', '.join(self.drafts)}, found {kind!r:.80}"
                )
            given["bits"] = self.bits if kind == "lowbit" else None
        options = merge_options(known, given)
        for name in ("stop", "ban"):
            if len("".join(given.get(name, []))) > MOST_SEARCHED:
                raise HTTPException(400, f"{name} must have at most {MOST_SEARCHED} characters")
        if given.get("gamma", 0) > MAX_GAMMA:
            raise HTTPException(400, f"gamma must be at most {MAX_GAMMA}, found {options.gamma}")
        return options

    def check_model(self, name: str) -> None:
        """Raises HTTPException for a model that is not served."""
        if name != self.command_line.name:
            raise HTTPException(
                404, f"model {name!r:.80} does not exist here: there is {self.command_line.name}"
            )


def given_options(body: TextBody) -> dict[str, Any]:
    """The options of the command line that a body gives, unchecked. Raises HTTPException for a
    field that is none of them, unless it has no effect: null, false, empty or a default.
    """
    given: dict[str, Any] = {}
    for name, value in body.model_extra.items():
        is_neutral = value is not True and NEUTRAL.get(name) == value
        if name in SHARED and value is not None:
            is_one = name in ("stop", "ban") and isinstance(value, str)
            given[name] = [value] if is_one else value
        elif not (value is False or value in NOTHING or name in UNUSED or is_neutral):
            raise HTTPException(400, f"{name} is not supported: leave it out")
    if body.response_format and body.response_format.grammar() and body.structured_outputs:
        raise HTTPException(400, "response_format and structured_outputs: give one of them")
    for structure in filter(None, (body.response_format, body.structured_outputs)):
        given |= structure.grammar()
    for name, most in MAX_SOURCE.items():
        if len(given.get(name, "")) > most:
            raise HTTPException(400, f"{name} must have at most {most} characters")
    return given
