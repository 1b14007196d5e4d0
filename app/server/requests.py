"""Requests: the part of OpenAI's API that is served, as models of JSON that become options.

What becomes of a field of a request:

* null, or its value in ``NEUTRAL``: it asks for nothing, and is left out;
* one of ``UNUSED``, or unknown and empty: the same;
* a field of a body: it is checked, and is an option of the text if ``Options`` has its name;
* any other: it is refused, since it may ask for something.

Knows nothing of sockets and of how a text is written.
"""

import re
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

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
    model_validator,
)

from app.drafts import KINDS
from app.options import Options, names_of
from app.prompt import LARK_START
from app.sample import Sample
from app.session import Session
from model.errors import InputError, one_line

# Fields that have no effect here, whatever their values
UNUSED = {
    "cache_control",
    "metadata",
    "name",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Values by which a field asks for nothing. False is none of them unless a row says so: the default
# of a field that another server knows may be true.
NEUTRAL = {
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "n": (1,),
    "best_of": (1,),
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
OF_A_CALL = {*names_of("call")}
# An option in the errors of the command line: --exit-layer, --no-chat, or top-p as the first word
DASHED = "|".join(each.name.replace("_", "-") for each in fields(Options))
OPTION_IN_ERRORS = re.compile(rf"(?:--|^)((?:no-)?(?:{DASHED}))(?![\w-])")
# Lengths are in characters. Stop strings are searched for after each token. Thousands of Lark rules
# that each name the next overflow the stack of llguidance, which ends the process.
Strings = Annotated[
    list[Annotated[str, Field(max_length=256)]] | None,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=256),
]
Regex = Annotated[str, StringConstraints(max_length=1 << 16)]
MOST_GAMMA_ASKED = 32  # tokens per draft that a request may ask for
Likeliest = Annotated[int, Field(ge=0, le=20)] | None


class Body(BaseModel):
    """JSON object whose unknown fields are refused, unless they ask for nothing: clients send back
    the answers that they received, with ``"refusal": null``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_neutral_fields(cls, body: Any) -> Any:
        """Return the body without the fields that ask for nothing."""
        if not isinstance(body, dict):
            return body
        known = {  # as requests spell them
            spelling
            for name, field in cls.model_fields.items()
            for spelling in getattr(
                field.validation_alias, "choices", [field.validation_alias or name]
            )
        }
        return {
            name: value
            for name, value in body.items()
            if not is_neutral(name, value, name in known)
        }


def is_neutral(name: str, value: Any, is_known: bool) -> bool:
    """Return whether a field asks for nothing."""
    return (
        value is None
        or name in UNUSED
        or (value in ("", [], {}) and not is_known)
        # Types are compared too, since True equals 1.
        or (type(value), value) in [(type(each), each) for each in NEUTRAL.get(name, ())]
    )


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
    """vLLM's ``structured_outputs``. The text is one of the strings of ``choice``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: Json[dict[str, Any]] | dict[str, Any] | None = Field(None, alias="json")
    regex: Regex | None = None
    choice: Annotated[list[Regex], Field(min_length=1, max_length=256)] | None = None
    grammar: Annotated[str, StringConstraints(max_length=1 << 13, pattern=LARK_START)] | None = None

    def option(self) -> dict[str, Any]:
        """Return the option that is given, with its name. Raises InputError unless it is one."""
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise InputError("structured_outputs: give one of json, regex, choice and grammar")
        return {"regex": "|".join(map(re.escape, self.choice))} if self.choice else given


def structured(form: Any) -> Any:
    """Return OpenAI's ``response_format`` as vLLM's ``structured_outputs``, and these as they are.
    Raises ValueError.
    """
    match form:
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": _}:
            raise ValueError("give the type text, json_object, or json_schema with a schema")
    return form


def only_prompt(prompt: Any) -> str | list[int]:
    """Return the one prompt of a completion: a text, or its token ids. Raises ValueError."""
    match prompt:
        case [str() | list() as only]:
            return only_prompt(only)
        case str() | [int(), *_] if prompt:
            return prompt
    raise ValueError("give one text that is not empty, or one list of token ids")


class TextBody(Body):
    """Fields of every request for a text.

    Fields of type ``Any`` are options that a request gives as the command line does: ``Options``
    checks them. No field names a file, a folder or a class, so a ``draft`` is never a file of code.
    ``bits``, ``window``, ``plan`` and ``exit_layer`` are the server's own, since each value may
    need more copies of the weights or a step of its own. The copies of a ``draft`` are made once,
    and ``LoadedModel.prepare`` checks that they fit.

    With ``trace`` a stream tells the verdicts of each round. Each kind of body has ``likeliest``:
    the number of likeliest tokens whose log probabilities are told in the place of each token,
    beside its own. If it is None, no log probabilities are told.
    """

    # Options as the command line gives them
    temperature: Any = None
    top_p: Any = None
    min_p: Any = None
    seed: Any = None
    coupling: Any = None
    repetition_penalty: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    adaptive: Any = None
    min_target_confidence: Any = None
    # Fields with limits, or in a form of the API
    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    top_k: Annotated[Any, AfterValidator(lambda top_k: 0 if top_k == -1 else top_k)] = None
    stop: Strings = None
    ban: Strings = None
    draft: Literal[tuple(KINDS)] | None = None
    gamma: Annotated[int, Field(ge=0, le=MOST_GAMMA_ASKED)] | None = None
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(structured)] = Field(
        None, validation_alias=AliasChoices("structured_outputs", "response_format")
    )
    model: str | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = Field(default_factory=dict)
    trace: bool = False

    def options(self) -> dict[str, Any]:
        """Return the options that the request gives. Raises InputError."""
        given = self.model_dump(include=OF_A_CALL, exclude_none=True)
        form = self.structured_outputs
        return given | form.option() if form else given


class CompletionBody(TextBody):
    """JSON of ``/v1/completions``: the prompt is plain text, or its token ids."""

    is_chat: ClassVar[bool] = False
    prompt: Annotated[Any, AfterValidator(only_prompt)]
    likeliest: Likeliest = Field(None, validation_alias="logprobs")


class ChatBody(TextBody):
    """JSON of ``/v1/chat/completions``. ``chat_template_kwargs`` are variables of the template."""

    is_chat: ClassVar[bool] = True
    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Likeliest = None

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The conversation, as a session reads it."""
        return [{"role": each.role, "content": each.content} for each in self.messages]

    @property
    def likeliest(self) -> int | None:
        """See ``TextBody``. OpenAI's API has it in two fields."""
        if self.logprobs or self.top_logprobs:
            return self.top_logprobs or 0
        return None


def kinds_at_hand(session: Session) -> list[str]:
    """Return the kinds of draft that a request can choose: the server's own, and all but those that
    need an option, since a request cannot give it. A layer plan may also lie in the model's folder.
    """
    at_hand = {None, "plan"} if (session.folder / "plan.json").exists() else {None}
    return [
        name
        for name, kind in KINDS.items()
        if kind.needs in at_hand or name == session.options.draft
    ]


def sample_of(session: Session, body: CompletionBody | ChatBody) -> Sample:
    """Return the text of a request, with its prompt only. Raises InputError."""
    kinds = kinds_at_hand(session)
    if body.draft and body.draft not in kinds:
        raise InputError(f"draft must be one of {', '.join(kinds)} here", "draft")
    as_it_is = {"chat": False, "system": None, "chat_template_kwargs": None}
    options = session.options.merged(body.options() | ({} if body.is_chat else as_it_is))
    ids = session.encode(body.prompt, options)
    return session.begin(ids, options, continues=body.is_chat)


def complaint(error: InputError | ValidationError) -> tuple[str, str | None]:
    """Return what a client is told of an error in its request, and the field at fault, if known.

    A request spells ``top_p`` what errors of the command line call ``--top-p``. Other
    words may be quoted from the request, and stay.
    """
    if isinstance(error, InputError):
        return OPTION_IN_ERRORS.sub(lambda flag: flag[1].replace("-", "_"), str(error)), error.field
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    told = (
        "it is not supported, or another field says the same: leave it out"
        if first["type"] == "extra_forbidden"
        else first["msg"].removeprefix("Value error, ")
    )
    return f"{one_line(field)[:80] if field else 'the body'}: {told}", field or None
