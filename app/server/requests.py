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

from app.options import KINDS
from app.sample import Sample
from app.session import Session
from model.errors import InputError, one_line

# Unknown fields that have no effect here, and values that ask for nothing. Any other unknown field
# is refused unless it is null or empty; false is not enough, since its default may be true.
UNUSED = {
    *("cache_control", "metadata", "name", "parallel_tool_calls", "prompt_cache_key"),
    *("safety_identifier", "service_tier", "store", "user"),
}
NEUTRAL = {
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), (-1,)),
    "min_tokens": [0],
    "modalities": [["text"]],
    "tool_choice": ["none", "auto"],
}
# Options of the command line that a request may give, checked by ``Options``: no files and folders.
OPTIONS = (
    *("temperature", "top_p", "min_p", "seed", "coupling"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("exit_layer", "adaptive", "min_target_confidence"),
)
# Fields of requests for options of other names
SPELLINGS = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
}
# Lengths are in characters. Stop strings are searched for after each token. Thousands of Lark rules
# that each name the next overflow the stack of llguidance, which ends the process.
Strings = Annotated[
    list[Annotated[str, Field(max_length=256)]] | None,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=256),
]
Regex = Annotated[str, StringConstraints(max_length=1 << 16)]


class Body(BaseModel):
    """JSON object whose unknown fields are refused, unless they have no effect: clients send back
    the answers that they received with ``"refusal": null``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_neutral_fields(cls, body: Any) -> Any:
        """Return the body without fields that have no effect."""
        if not isinstance(body, dict):
            return body
        return {
            name: value
            for name, value in body.items()
            if not is_neutral(name, value, name in cls.model_fields)
        }


def is_neutral(name: str, value: Any, is_known: bool) -> bool:
    """Return whether a field asks for nothing."""
    is_unused = not is_known and (name in UNUSED or value in ("", [], {}))
    return is_unused or value is None or value in NEUTRAL.get(name, ())


class TextPart(Body):
    """Part of a message: text, the only kind that a model here reads."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a chat. A ``content`` in parts becomes one string, and the role "developer"
    becomes "system".
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


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``. ``choice``: strings of which the text is one."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: Json[dict[str, Any]] | dict[str, Any] | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Annotated[list[Regex], Field(min_length=1, max_length=256)] | None = None
    grammar: Annotated[str, StringConstraints(max_length=1 << 13, pattern="start:")] | None = None

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


def only_prompt(prompt: Any) -> str | list[int]:
    """Return the one prompt of a completion: a text, or its token ids. Raises ValueError."""
    match prompt:
        case [str() | list() as only]:
            return only_prompt(only)
        case str() if prompt:
            return prompt
        case [int(), *_] if all(type(each) is int and each >= 0 for each in prompt):
            return prompt
    raise ValueError("give one text that is not empty, or one list of token ids")


Top = Annotated[int, Field(ge=0, le=20)]


class OptionsBody(create_model("Options", __base__=Body, **dict.fromkeys(OPTIONS, (Any, None)))):
    """Fields for options of the command line. A ``draft`` is one of ``KINDS``, never a file of
    code.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    top_k: Annotated[Any, AfterValidator(lambda top_k: 0 if top_k == -1 else top_k)] = None
    stop: Strings = None
    ban: Strings = None
    draft: Literal[tuple(KINDS)] | None = None
    gamma: Annotated[int, Field(ge=0, le=32)] | None = None


class TextBody(OptionsBody):
    """Fields of every request. ``trace``: a stream tells the verdicts of each round."""

    model: str | None = None
    response_format: Annotated[StructuredOutputs | None, BeforeValidator(structured)] = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    trace: bool = False

    def options(self) -> dict[str, Any]:
        """Return the options that the request gives. Raises InputError."""
        names = {*OptionsBody.model_fields, "chat_template_kwargs"}
        given = self.model_dump(include=names, exclude_none=True)
        for form in filter(None, (self.response_format, self.structured_outputs)):
            given |= form.options()
        return given


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``: the prompt is plain text, or its token ids."""

    prompt: Annotated[Any, AfterValidator(only_prompt)]
    logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        """The number of likeliest tokens of which log probabilities are told; None: of none."""
        return self.logprobs


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``. ``chat_template_kwargs`` are variables of the template."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        """The number of likeliest tokens of which log probabilities are told; None: of none."""
        return self.top_logprobs or 0 if self.logprobs or self.top_logprobs else None


def begin(session: Session, body: CompletionBody | ChatBody) -> Sample:
    """Return the text of a request, with its prompt only. Raises InputError."""
    options = session.options.merged(body.options())
    if isinstance(body, ChatBody):
        prompt = [{"role": each.role, "content": each.content} for each in body.messages]
        ids = session.encode(prompt, options)
    else:
        ids = session.encode(body.prompt, replace(options, chat=False, system=None))
    sample = session.begin(ids, options)
    sample.continues = isinstance(body, ChatBody)
    return sample


def complaint(error: InputError | ValidationError) -> tuple[str, str | None]:
    """Return what a client is told of an error in its request, and the field at fault, if known."""
    if isinstance(error, InputError):
        return as_fields(str(error), error.field), SPELLINGS.get(error.field, error.field)
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    is_unknown = first["type"] == "extra_forbidden"
    told = "it is not supported: leave it out" if is_unknown else first["msg"]
    return f"{one_line(field)[:80] if field else 'the body'}: {told}", field


def as_fields(told: str, option: str | None) -> str:
    """Return an error with the names of fields in place of those of options: ``--exit-layer`` and,
    of the ``option`` at fault, "exit-layer" alone become ``exit_layer``.
    """

    def field(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return SPELLINGS.get(name, name)

    alone = (option or "--").replace("_", "-")
    return re.sub(rf"\b({alone})\b", field, re.sub("--([a-z-]+)", field, told))
