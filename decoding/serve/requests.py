"""Requests: pydantic models of their JSON, and the checked ``TextRequest`` made of each.

Fields have OpenAI's names, others those of the command line.
"""

from __future__ import annotations

import re
import threading
from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from decoding.run.chooser import DRAFTERS, DraftOptions
from decoding.run.options import Request, TextOptions
from model import InputError
from model.plan import LOW_BITS
from weights.cli.prompt import encode_prompt
from weights.tokenizer import Tokenizer

MAX_SAMPLES, MAX_GAMMA = 16, 32
MAX_STRINGS, MAX_CHARACTERS = 16, 128  # stop strings or banned words, which are searched after every token
UNUSED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
NEUTRAL = {"best_of": 1, "modalities": ["text"], "response_format": {"type": "text"}, "tool_choice": "none"}
FILES = {
    "skip": "plan",
    "auto": "plan",
    "model": "draft_model",
}  # options that only the command line gives


class Refusal(InputError):
    """Refusal of a request: a sentence, the HTTP status, and the field and code of OpenAI's errors."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @staticmethod
    def of(error: InputError) -> Refusal:
        """The refusal for an error. In its words, option ``--exit-layer`` becomes field ``exit_layer``."""
        if isinstance(error, Refusal):
            return error
        words = re.sub(r"--([a-z-]+)", lambda option: option[1].replace("-", "_"), str(error))
        return Refusal(words, param=re.split(r"\W", words)[0] if str(error).startswith("--") else None)

    @staticmethod
    def of_field(error: ValidationError) -> Refusal:
        """The refusal for the first wrong field."""
        first = error.errors(include_url=False)[0]
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:81]
        must = re.sub(r"^[A-Z][a-z]+ should", f"{name or 'the body'} must", first["msg"])
        words = {
            "extra_forbidden": f"{name} is not served here: leave it out",
            "json_invalid": f"the body is not valid JSON: {must.removeprefix('Invalid JSON: ')}",
            "missing": f"{name} is missing",
            "string_pattern_mismatch": f"{name} is empty: give it at least one character",
        }
        message = words.get(first["type"], f"{must}, found {first['input']!r:.80}")
        return Refusal(message, param=name or None, code=first["type"])

    def data(self) -> dict[str, Any]:
        """The error in OpenAI's JSON."""
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        facts = {"message": str(self), "type": kind.get(self.status, "invalid_request_error")}
        return {"error": {**facts, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """A JSON object. Further fields are allowed where they have no effect: null, false, 0, empty or a default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def without_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        neutral = {name for name, field in value.items() if not field or NEUTRAL.get(name) == field} | UNUSED
        neutral -= cls.model_fields.keys()
        return {name: field for name, field in value.items() if field is not None and name not in neutral}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
        Field(min_length=1),
    ]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """The message for chat templates, which call the developer "system"."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


Strings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=MAX_STRINGS),
]


class Options(Strict):
    """Fields of every request. None: as on the command line."""

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
    draft: str | None = None
    exit_layer: int | None = Field(None, ge=1)
    bits: int | None = None
    gamma: int | None = Field(None, ge=0, le=MAX_GAMMA)
    adaptive: bool | None = None
    min_target_confidence: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    stream_options: dict[str, bool] = {}


class Completion(Options):
    """JSON of ``/v1/completions``."""

    prompt: Annotated[
        str,
        BeforeValidator(lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value),
        Field(pattern=r"\S"),
    ]

    def encode(self, tokenizer: Tokenizer, options: Namespace) -> list[int]:
        """Token ids of the prompt as plain text."""
        return tokenizer.encode(self.prompt)


class LiveText(Completion):
    """JSON of the live page. ``beside``: write the text plainly as well."""

    n: Literal[1] = 1
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
        messages = [message.for_template() for message in self.messages]
        if options.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": options.system})
        return tokenizer.encode_chat(messages)


@dataclass(frozen=True)
class TextRequest:
    """A checked request: its JSON, the prompt's token ids, and the number and options of its texts."""

    asked: Completion | Chat
    ids: list[int]
    samples: int
    options: TextOptions


class RequestReader:
    """Reader of requests for texts of up to ``capacity`` positions, prompt included. Any thread may call it.

    Low-bit drafts are in ``bits`` bits, since memory is counted for low-bit weights of one width.
    """

    def __init__(self, command_line: Request, tokenizer: Tokenizer, capacity: int, bits: int) -> None:
        self.config, self.options = command_line.config, command_line.options
        self.tokenizer, self.capacity, self.bits = tokenizer, capacity, bits
        self.name = command_line.folder.resolve().name  # of the model, in requests
        has_plan = self.options.plan is not None or (command_line.folder / "plan.json").exists()
        missing = {"skip": not has_plan, "model": self.options.draft_model is None}
        self.drafts = [kind for kind in DRAFTERS if not missing.get(kind)]  # no file, folder or class
        self.encoding = threading.Lock()  # encoding changes the tokenizer's state

    def read(self, kind: type[Completion | Chat], body: bytes) -> TextRequest:
        """The request in the JSON of a body. Raises InputError where it cannot be served."""
        try:
            asked = kind.model_validate_json(body)
        except ValidationError as error:
            raise Refusal.of_field(error) from None
        self.check_model(asked.model or self.name)
        options = self._merged(asked)
        with self.encoding:
            ids = asked.encode(self.tokenizer, options)
        param = "messages" if kind is Chat else "prompt"
        if not ids or max(ids) >= self.config.vocab_size:
            raise Refusal("the model has no tokens for this prompt", param=param)
        if len(ids) >= self.capacity:
            message = f"the prompt has {len(ids)} tokens, the context {self.capacity}: shorten the prompt"
            raise Refusal(message, param=param, code="context_length_exceeded")
        options.max_new_tokens = min(options.max_new_tokens, self.capacity - len(ids))
        return TextRequest(asked, ids, options.num_samples, TextOptions.of(options, self.tokenizer.eos_ids))

    def check_model(self, name: str) -> None:
        """Raises Refusal for a model that is not served."""
        if name != self.name:
            message = f"the model {name!r:.80} does not exist here: there is {self.name}"
            raise Refusal(message, status=404, param="model", code="model_not_found")

    def _merged(self, asked: Options) -> Namespace:
        """The request's options, and the command line's where the request gives none.

        The command line's options of drafting hold for its kind of draft. Another kind gets only its plan or model.
        """
        options, layers = vars(self.options), self.config.num_layers
        if asked.draft not in (None, *self.drafts):
            known = ", ".join(self.drafts)
            raise Refusal(f"draft must be one of {known}, found {asked.draft!r:.80}", param="draft")
        if (asked.exit_layer or 1) > layers:
            raise Refusal(f"exit_layer must be from 1 to {layers}, found {asked.exit_layer}", param="exit_layer")
        if asked.bits in LOW_BITS and asked.bits != self.bits:
            message = f"bits must be {self.bits}: a second width needs another server, started with that width"
            raise Refusal(message, param="bits")
        if asked.draft not in (None, self.options.draft):
            others = {field.name for field in fields(DraftOptions)} - {FILES.get(asked.draft)}
            options = {**options, **dict.fromkeys(others), "bits": self.bits if asked.draft == "lowbit" else None}
        given = {name: value for name, value in asked if value is not None}
        merged = Namespace(**{**options, **given})
        merged.max_new_tokens = asked.max_completion_tokens or asked.max_tokens or merged.max_new_tokens
        merged.num_samples = asked.n or merged.num_samples
        return merged
