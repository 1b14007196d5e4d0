"""Requests: pydantic models of their JSON, and their reader.

Fields have OpenAI's names, others those of the command line.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from decoding.run.chooser import DRAFTERS, DraftOptions
from decoding.run.options import Request, TextOptions
from model import InputError
from weights.cli.command_line import say
from weights.cli.files import one_line
from weights.cli.prompt import encode_prompt
from weights.tokenizer import Tokenizer

MAX_SAMPLES, MAX_GAMMA = 16, 32
MAX_STRINGS, MAX_CHARACTERS = 16, 128  # stop strings or banned words, which are searched after every token
UNUSED = {"metadata", "parallel_tool_calls", "safety_identifier", "service_tier", "store", "user"}
NEUTRAL = {"best_of": 1, "modalities": ["text"], "response_format": {"type": "text"}, "tool_choice": "none"}
FILES = {"skip": "plan", "auto": "plan", "model": "draft_model"}  # kind of draft -> option of the command line alone


class Refusal(InputError):
    """Refusal of a request: a sentence, the HTTP status, and the field and code of OpenAI's errors."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @staticmethod
    def of(error: BaseException) -> Refusal:
        """The refusal for an error, with option ``--exit-layer`` as field ``exit_layer``.

        A failure such as exhausted memory is printed; the client is told no details.
        """
        if isinstance(error, Refusal):
            return error
        if isinstance(error, HTTPException):  # no such path or method, or a client that has disconnected
            return Refusal(error.detail, status=error.status_code)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:81]
            return Refusal(f"{name or 'the body'}: {first['msg']}", param=name or None, code=first["type"])
        if not isinstance(error, InputError):
            say(f"a request could not be answered: {type(error).__name__}: {one_line(error)}")
            return Refusal("the request could not be answered", status=500)
        words = re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
        return Refusal(words, param=re.split(r"\W", words)[0] if str(error).startswith("--") else None)

    def data(self) -> dict[str, Any]:
        """The error in OpenAI's JSON."""
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        facts = {"message": str(self), "type": kind.get(self.status, "invalid_request_error")}
        return {"error": {**facts, "param": self.param, "code": self.code}}


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
        Field(min_length=1),
    ]


Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STRINGS),
]


class Options(BaseModel):
    """Fields of every request. None: as on the command line."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    seed: int | None = Field(None, ge=0, lt=2**64)
    coupling: Literal["ratio", "race"] | None = None
    stop: Strings | None = None
    ban: Strings | None = None
    draft: Literal[tuple(DRAFTERS)] | None = None
    exit_layer: int | None = Field(None, ge=1)
    bits: int | None = None
    gamma: int | None = Field(None, ge=0, le=MAX_GAMMA)
    adaptive: bool | None = None
    min_target_confidence: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None


class Completion(Options):
    """JSON of ``/v1/completions``."""

    prompt: str = Field(min_length=1)

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> list[int]:
        """Token ids of the prompt as plain text."""
        return tokenizer.encode(self.prompt)


class LiveText(Completion):
    """JSON of the live page. ``beside``: write the text plainly as well."""

    stream: Literal[True] = True
    beside: bool = False

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> list[int]:
        """Token ids of the prompt, encoded as on the command line."""
        return encode_prompt(tokenizer, self.prompt, chat=options.chat, system=options.system)


class Chat(Options):
    """JSON of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> list[int]:
        """Token ids of the messages. Where they begin with no system message, the command line's stands before them."""
        if tokenizer.chat_template is None:
            raise Refusal("this model has no chat template: use /v1/completions", param="model")
        roles = ["system" if message.role == "developer" else message.role for message in self.messages]
        texts = ["".join(part.text for part in message.content) for message in self.messages]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        if options.system is not None and roles[0] != "system":
            messages.insert(0, {"role": "system", "content": options.system})
        return tokenizer.encode_chat(messages)


class RequestReader:
    """Reader of requests for texts of up to ``capacity`` positions, prompt included.

    Low-bit drafts are in ``bits`` bits, since memory is counted for low-bit weights of one width.
    """

    def __init__(self, command_line: Request, tokenizer: Tokenizer, capacity: int, bits: int) -> None:
        self.config, self.options = command_line.config, command_line.options
        self.tokenizer, self.capacity, self.bits = tokenizer, capacity, bits
        self.name = command_line.folder.resolve().name  # of the model, in requests

    def read(self, kind: type[Completion | Chat], body: bytes) -> tuple[Completion | Chat, list[int], TextOptions]:
        """The JSON of a body, the prompt's token ids, and the options. Raises InputError and ValidationError.

        Further fields are allowed where they have no effect: null, false, 0, empty or a default. The command line's
        options hold where the request gives none. Those of drafting hold for its kind of draft; another kind gets only
        its plan or model.
        """
        asked, layers = kind.model_validate_json(body), self.config.num_layers
        self.check_model(asked.model or self.name)
        for name, value in asked.model_extra.items():
            if value and NEUTRAL.get(name) != value and name not in UNUSED:
                raise Refusal(f"{name} is not served here: leave it out", param=name)
        if (asked.exit_layer or 1) > layers:
            raise Refusal(f"exit_layer: the model has {layers} layers", param="exit_layer")
        if asked.bits not in (None, self.bits):
            raise Refusal(f"bits must be {self.bits}: other bits need another server", param="bits")
        given = vars(self.options)
        if asked.draft not in (None, self.options.draft):
            others = {field.name for field in fields(DraftOptions)} - {FILES.get(asked.draft)}
            given = {**given, **dict.fromkeys(others), "bits": self.bits if asked.draft == "lowbit" else None}
        asked_for = {name: value for name in Options.model_fields if (value := getattr(asked, name)) is not None}
        options = Namespace(**{**given, **asked_for})
        ids = asked.encode(self.tokenizer, options)
        param, left = "messages" if kind is Chat else "prompt", self.capacity - len(ids)
        if not ids or max(ids) >= self.config.vocab_size:
            raise Refusal("the model has no tokens for this prompt", param=param)
        if left <= 0:
            message = f"the prompt has {len(ids)} tokens, the context {self.capacity}: shorten the prompt"
            raise Refusal(message, param=param, code="context_length_exceeded")
        wanted = asked.max_completion_tokens or asked.max_tokens or options.max_new_tokens
        options.max_new_tokens = min(wanted, left)
        return asked, ids, TextOptions.of(options, self.tokenizer.eos_ids)

    def check_model(self, name: str) -> None:
        """Raises Refusal for a model that is not served."""
        if name != self.name:
            message = f"the model {name!r:.80} does not exist here: there is {self.name}"
            raise Refusal(message, status=404, param="model", code="model_not_found")
