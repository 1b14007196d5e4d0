"""Requests: the part of OpenAI's API that is served, as models of JSON that become options.

Knows nothing of sockets and of how a text is written.
"""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)

from app.files import one_line
from app.options import KINDS
from app.session import Sample, Session
from model.errors import InputError

# Fields that have no effect here, and values of others that ask for nothing.
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
# Options of the command line that a request may give, checked by ``Options``: no files and folders.
OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "coupling"),
    *("exit_layer", "adaptive", "min_target_confidence"),
)
GIVEN = {*OPTIONS, "max_new_tokens", "stop", "ban", "draft", "gamma"}
# Lengths are in characters. Stop strings are searched for after each token. Thousands of Lark rules
# that each name the next overflow the stack of llguidance, which ends the process.
Strings = Annotated[
    list[Annotated[str, Field(max_length=256)]] | None,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=256),
]
Regex = Annotated[str, StringConstraints(max_length=1 << 16)]
Grammar = Annotated[str, StringConstraints(max_length=1 << 13, pattern="start:")]


class Body(BaseModel):
    """JSON object whose unknown fields are refused, unless they have no effect: clients send back
    the answers that they received with ``"refusal": null``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_neutral_fields(cls, body: Any) -> Any:
        """Return the body without unknown fields that have no effect."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if name in cls.model_fields or not is_neutral(name, value)
        }


def is_neutral(name: str, value: Any) -> bool:
    """Return whether an unknown field is without effect, null, false, empty, or its default."""
    is_default = value is not True and NEUTRAL.get(name) == value
    return name in UNUSED or value is False or value in (None, "", [], {}) or is_default


class TextPart(Body):
    """Part of a message: text, the only kind that a model here reads."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a chat. A ``content`` in parts becomes one string, and the role "developer"
    becomes "system". The ``name`` of a participant is not told to the model.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[
        list[TextPart],
        Field(min_length=1),
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value
        ),
        AfterValidator(lambda parts: "".join(part.text for part in parts)),
    ]
    name: str | None = None


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``. ``choice``: strings of which the text is one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: Json[dict[str, Any]] | dict[str, Any] | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Annotated[list[Regex], Field(min_length=1, max_length=256)] | None = None
    grammar: Grammar | None = None

    def options(self) -> dict[str, Any]:
        """Return the command line's option of the kind that is given. Raises InputError."""
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise InputError("structured_outputs: give one of json, regex, choice and grammar")
        return {"regex": "|".join(map(re.escape, self.choice))} if self.choice else given


def structured(response_format: Any) -> Any:
    """Return OpenAI's ``response_format`` as vLLM's ``structured_outputs``."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise ValueError("give the type text, json_object, or json_schema with a schema")


class TextBody(create_model("Options", __base__=Body, **dict.fromkeys(OPTIONS, (Any, None)))):
    """Fields of every request: those of OpenAI's API, and options of the command line. A ``draft``
    is one of ``KINDS``, never a file of code. ``trace``: a stream tells the verdicts of each round.
    """

    model: str | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: Strings = None
    ban: Strings = None
    draft: Literal[tuple(KINDS)] | None = None
    gamma: Annotated[int, Field(ge=0, le=32)] | None = None
    response_format: Annotated[StructuredOutputs | None, BeforeValidator(structured)] = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    trace: bool = False


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``: the prompt is plain text."""

    prompt: str = Field(min_length=1)


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)


def begin(session: Session, body: CompletionBody | ChatBody) -> Sample:
    """Return the text of a request, with its prompt only. Raises InputError."""
    given = body.model_dump(include=GIVEN, exclude_none=True)
    for form in filter(None, (body.response_format, body.structured_outputs)):
        given |= form.options()
    options = session.options.merged(given)
    if isinstance(body, CompletionBody):
        plain = replace(options, chat=False, system=None)
        return session.begin(session.encode(body.prompt, plain), options)
    messages = [{"role": each.role, "content": each.content} for each in body.messages]
    sample = session.begin(session.encode_messages(messages, options), options)
    sample.continues = True
    return sample


def complaint(error: InputError | ValidationError) -> tuple[str, str | None]:
    """Return what a client is told of an error in its request, and the field at fault, if known.

    Option ``--exit-layer`` is field ``exit_layer``.
    """
    if isinstance(error, InputError):
        told = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
        return told, error.field
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    is_unknown = first["type"] == "extra_forbidden"
    told = "it is not supported: leave it out" if is_unknown else first["msg"]
    return f"{one_line(field)[:80] if field else 'the body'}: {told}", field
