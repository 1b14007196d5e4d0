"""Requests: pydantic models of their JSON bodies, and their reader.

Each field is checked once. Those of OpenAI's API are checked by the models here. They refuse an
unknown field, of a message too, unless it has no effect, such as null. Options of the command line
are checked as in a call from Python: their types by ``merge_options``, their ranges by
``TextOptions``.
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
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from app.command_line import say
from app.draft_options import KINDS
from app.files import one_line
from app.options import merge_options
from app.prompt import Spans, check_prompt, conversation, too_long
from app.request import Request, TextOptions, read_grammar_files
from decoding.sampling import SamplingParams
from model import InputError
from weights.tokenizer import Tokenizer

MAX_GAMMA = 32
# Options of the command line that a request may give: those of Python, without files and folders.
REQUESTABLE = {field.name for field in fields(SamplingParams)} | {
    *("seed", "coupling", "stop", "ban", "schema_prompt"),
    *("draft", "exit_layer", "gamma", "adaptive", "min_target_confidence"),
}
# Longest sources in characters. Thousands of Lark rules that each name the next overflow the stack
# of llguidance, which ends the process.
MAX_SOURCE = {"json_schema": 1 << 16, "regex": 1 << 16, "grammar": 1 << 13}
MOST_SEARCHED = 1 << 13  # characters of stop or ban: each is searched for after each token
MASK_SECONDS = 1.0  # longest that the masks of a text may take in all
# Fields of OpenAI's API that have no effect here, and values of others that change nothing.
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


def refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status of an error, and its JSON as in OpenAI's API, where ``param`` is the field at fault.

    Option ``--exit-layer`` is field ``exit_layer``. A failure such as exhausted memory is printed;
    the client is told no details.
    """
    status = 400
    param = None
    match error:
        case ValidationError():
            first = error.errors(include_url=False)[0]
            # a client's names may hold line breaks
            place = " ".join(".".join(map(str, first["loc"])).split())[:80] or "''"
            is_unknown = first["type"] == "extra_forbidden"
            told = "it is not supported: leave it out" if is_unknown else first["msg"]
            message = f"{place if first['loc'] else 'the body'}: {told}"
            param = f"{first['loc'][0]:.80}" if first["loc"] else None
        case HTTPException():
            status = error.status_code
            message = error.detail
        case InputError() if not error.__cause__:  # of code of the server's user, it is no client's
            status = 404 if error.field == "model" else 400
            message = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
            param = error.field
        case _:
            say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
            status = 500
            message = "the request could not be answered"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": None}}


class Body(BaseModel):
    """JSON object whose unknown fields are refused, unless they have no effect: clients send back
    the answers that they received with ``"refusal": null``.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_neutral_fields(cls, body: Any) -> Any:
        """The body without unknown fields that have no effect."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if name in cls.model_fields or not is_neutral(name, value)
        }


class TextPart(Body):
    """Part of a message: text, the only kind that a model here reads."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a chat. A ``content`` that is a string becomes a list of one part, and the role
    "developer" becomes "system". The ``name`` of a participant is not told to the model.
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
    name: str | None = None

    @property
    def text(self) -> str:
        """All parts of the content."""
        return "".join(part.text for part in self.content)


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``. ``choice``: strings of which the text is one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: Annotated[
        str | None,
        BeforeValidator(lambda value: json.dumps(value) if isinstance(value, dict) else value),
    ] = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None

    def options(self) -> list[tuple[str, str]]:
        """The command line's option for each of them, and its value."""
        choice = self.choice and "|".join(map(re.escape, self.choice))
        found = [
            ("json_schema", self.json_schema),
            ("regex", self.regex),
            ("regex", choice),
            ("grammar", self.grammar),
        ]
        return [(name, source) for name, source in found if source is not None]


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field of OpenAI's API has no effect here: any UNUSED one, and one that is null,
    false, empty, or the default.
    """
    is_default = value is not True and NEUTRAL.get(name) == value
    return name in UNUSED or value is False or value in NOTHING or is_default


def structured(response_format: Any) -> Any:
    """OpenAI's ``response_format`` as vLLM's ``structured_outputs``."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise PydanticCustomError(
        "response_format", "give the type text, json_object, or json_schema with a schema"
    )


class TextBody(create_model("Options", __base__=Body, **dict.fromkeys(REQUESTABLE, (Any, None)))):
    """Fields of every request: those of OpenAI's API, and options of the command line."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: Annotated[StructuredOutputs | None, BeforeValidator(structured)] = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None

    def options(self) -> dict[str, Any]:
        """The options of the command line that the body gives, unchecked. Raises InputError for
        several grammars, and for one that is too long.
        """
        given = self.model_dump(include=REQUESTABLE, exclude_none=True)
        for name in ("stop", "ban"):
            if isinstance(given.get(name), str):
                given[name] = [given[name]]
        forms = filter(None, (self.response_format, self.structured_outputs))
        grammars = [option for form in forms for option in form.options()]
        if len(grammars) > 1:
            raise InputError(
                "structured_outputs and response_format: give one of json, regex, choice and"
                " grammar",
                "structured_outputs",
            )
        for name, source in grammars:
            if len(source) > MAX_SOURCE[name]:
                raise InputError(f"{name} must have at most {MAX_SOURCE[name]} characters")
        return given | dict(grammars)


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``."""

    prompt: str = Field(min_length=1)

    def encode(self, tokenizer: Tokenizer, asked: TextOptions) -> tuple[list[int], Spans]:
        """Token ids of the prompt as plain text, and the earlier answers in it: none."""
        return tokenizer.encode(self.prompt), ()


class LiveBody(CompletionBody):
    """JSON of the live page. ``beside``: write the text plainly as well."""

    stream: Literal[True] = True
    beside: bool = False

    def encode(self, tokenizer: Tokenizer, asked: TextOptions) -> tuple[list[int], Spans]:
        """Token ids of the prompt, encoded as on the command line."""
        return asked.encode(tokenizer, self.prompt), ()


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)

    @property
    def prompt(self) -> str:
        """The text of all messages."""
        return "".join(message.text for message in self.messages)

    def encode(self, tokenizer: Tokenizer, asked: TextOptions) -> tuple[list[int], Spans]:
        """Token ids of the messages, and the positions of the answers in them.

        Where they begin with no system message, the command line's stands before them.
        """
        if tokenizer.chat_template is None:
            raise InputError("this model has no chat template: use /v1/completions")
        messages = [{"role": each.role, "content": each.text} for each in self.messages]
        if asked.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": asked.system})
        return conversation(tokenizer, messages, asked.schema)


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
        self.drafts = [kind for kind in KINDS if kind not in absent - {self.options.draft}]

    def read(self, kind: type[TextBody], data: bytes) -> ParsedRequest:
        """The request with this body. Raises the errors that ``refusal`` takes."""
        command_line = self.command_line
        body = kind.model_validate_json(data)
        self.check_model(body.model or command_line.name)
        options = self.options_of(body)
        size = len(body.prompt.encode())
        if size > self.most_bytes:
            raise too_long(f"{size} bytes", command_line.config, command_line.context)
        wanted = body.max_completion_tokens or body.max_tokens
        # as many of them as the context has room for
        options.max_new_tokens = wanted or options.max_new_tokens
        asked = command_line.text_options(options, MASK_SECONDS)
        ids, answers = body.encode(command_line.tokenizer, asked)
        check_prompt(ids, command_line.config, Path(command_line.name), command_line.context)
        return ParsedRequest(body, ids, answers, asked)

    def options_of(self, body: TextBody) -> Namespace:
        """The command line's options, with those of a request in their place; those of drafting
        hold for the command line's kind of draft only.
        """
        known = self.options
        given = body.options()
        kind = given.get("draft", known.draft)
        if kind != known.draft:
            if kind not in self.drafts:
                raise InputError(
                    f"draft must be one of {', '.join(self.drafts)}, found {kind!r:.80}", "draft"
                )
            given["bits"] = self.bits if kind == "lowbit" else None
        options = merge_options(known, given)
        for name in ("stop", "ban"):
            if len("".join(given.get(name, []))) > MOST_SEARCHED:
                raise InputError(f"{name} must have at most {MOST_SEARCHED} characters", name)
        if given.get("gamma", 0) > MAX_GAMMA:
            raise InputError(f"gamma must be at most {MAX_GAMMA}, found {options.gamma}", "gamma")
        return options

    def check_model(self, name: str) -> None:
        """Raises InputError for a model that is not served."""
        if name != self.command_line.name:
            raise InputError(
                f"model {name!r:.80} does not exist here: there is {self.command_line.name}",
                "model",
            )
