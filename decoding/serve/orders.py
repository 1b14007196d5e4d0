"""What a client asks for in JSON -> an order, checked. Names are OpenAI's, or else the command line's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from decoding.run.chooser import DRAFTERS, DraftOptions
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import COUPLINGS, Coupling
from model import InputError, ModelConfig
from weights.cli.files import is_there
from weights.cli.prompt import encode_prompt
from weights.tokenizer import Tokenizer

MOST_SAMPLES, LONGEST_GAMMA = 16, 32
MOST_STRINGS, LONGEST_STRING = 16, 128  # stop strings and banned words, in characters: each token is held to them all
NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
NAMES = {"prompt": "a prompt", "prompt_file": "--prompt-file", "dry_run": "--dry-run"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Refusal(InputError):
    """A request that is not served: the HTTP status, and what OpenAI's errors say of it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Defaults:
    """The model to serve, and what holds where a request says nothing: as on the command line."""

    folder: Path
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    draft: DraftOptions
    params: SamplingParams
    rules: Rules
    coupling: str | None = None
    seed: int | None = None
    samples: int = 1
    chat: bool | None = None  # whether the live page's prompt is one; the other endpoints say it by their names
    system: str | None = None

    @staticmethod
    def of(request: Any) -> Defaults:
        """Those of a checked command line (``generate.Request``). Raises InputError for options without effect."""
        options = request.options
        for name in ("prompt", "prompt_file", "dry_run", "compare", "trace", "html", "json"):
            if getattr(options, name):
                raise InputError(f"{NAMES.get(name, '--' + name)} has no effect with --serve: leave it out")
        said = (options.coupling, options.seed, options.num_samples, options.chat, options.system)
        model = (request.folder, request.config, request.dtype, request.device)
        return Defaults(*model, request.draft, request.params, request.rules, *said)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.folder.resolve().name

    @property
    def drafts(self) -> list[str]:
        """The names of the ways to draft that requests may ask for: never a file, a folder or a class."""
        has_plan = self.draft.plan is not None or is_there(self.folder / "plan.json")
        missing = {"skip": not has_plan, "model": self.draft.draft_model is None}
        return [name for name in DRAFTERS if not missing.get(name)]


@dataclass(frozen=True)
class Order:
    """What to write. ``watched``: with the details of every round, for the live page; ``beside``: plainly as well."""

    ids: list[int]
    draft: DraftOptions
    params: SamplingParams
    rules: Rules
    coupling: Coupling
    samples: int = 1
    streams: bool = False
    with_usage: bool = False
    watched: bool = False
    beside: bool = False


class Kind(NamedTuple):
    """A kind of JSON value, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", lambda value: type(value) is int)
NUMBER = Kind("a number", lambda value: type(value) is float or (type(value) is int and abs(value) < 2**64))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list that is not empty", lambda value: isinstance(value, list) and value != [])
STRINGS = Kind(
    f"a text or a list of up to {MOST_STRINGS}, of up to {LONGEST_STRING} characters each",
    lambda value: (
        isinstance(value, (str, list))
        and len(several(value)) <= MOST_STRINGS
        and all(isinstance(each, str) and len(each) <= LONGEST_STRING for each in several(value))
    ),
)


def several(value: Any) -> list[Any]:
    """A list, or the one value that stands for a list of one."""
    return value if isinstance(value, list) else [value]


class Fields:
    """The fields of a JSON object, taken one by one. What nobody takes must say nothing (null, false, 0, empty)."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise Refusal(f"{what} must be a JSON object")
        self.left = dict(value)

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        """The field, or the default where it is missing or null. Raises Refusal for one of another kind."""
        value = self.left.pop(name, None)
        if value is None:
            return default
        if not kind.fits(value):
            raise Refusal(f"{name} must be {kind.words}, found {value!r:.80}", param=name)
        return float(value) if kind is NUMBER else value

    def close(self) -> None:
        """Raises Refusal for a field that asks for what is not served here: ignoring it would answer another question.

        Fields that change nothing about a text are let pass.
        """
        for name, value in self.left.items():
            if value and name not in NO_EFFECT:
                raise Refusal(f"{name!r:.80} is not served here: leave it out", param=name[:80], code="unsupported")


def parse_body(body: bytes) -> Fields:
    """The JSON object of a request."""
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refusal("the body holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError):
        raise Refusal("the body is not valid JSON") from None
    return Fields(value, "the body")


class Orders:
    """Takes orders for one model, whose texts have ``capacity`` positions, prompt included; from any thread."""

    def __init__(self, defaults: Defaults, tokenizer: Tokenizer, capacity: int) -> None:
        self.defaults, self.tokenizer, self.capacity = defaults, tokenizer, capacity
        self.rules = replace(defaults.rules, eos_ids=tokenizer.eos_ids)
        self.encoding = threading.Lock()  # a tokenizer is told what to make of control tokens just before it encodes

    def chat(self, body: Fields) -> Order:
        """Of ``/v1/chat/completions``. Raises Refusal or InputError, as do the others."""
        messages = [self._message(Fields(each, "a message")) for each in body.take("messages", LIST, [])]
        if not messages:
            raise Refusal("messages must be a list that is not empty", param="messages")
        if self.defaults.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.defaults.system})
        if self.tokenizer.chat_template is None:
            raise Refusal("this model has no chat template: use /v1/completions", param="model")
        return self._completion(body, lambda: self.tokenizer.encode_chat(messages), "messages")

    def completion(self, body: Fields) -> Order:
        """Of ``/v1/completions``."""
        prompt = self._prompt(body)
        return self._completion(body, lambda: self.tokenizer.encode(prompt), "prompt")

    def live(self, body: Fields) -> Order:
        """Of the live page: a prompt as on the command line."""
        prompt, beside = self._prompt(body), body.take("beside", FLAG, False)
        system = self.defaults.system
        order = self._order(
            body, lambda: encode_prompt(self.tokenizer, prompt, chat=self.defaults.chat, system=system), "prompt"
        )
        return replace(order, samples=1, streams=True, watched=True, beside=beside)

    def _prompt(self, body: Fields) -> str:
        prompt = several(body.take("prompt", Kind("one text", lambda value: isinstance(value, (str, list))), ""))
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise Refusal("prompt must be one text", param="prompt")
        if not prompt[0].strip():
            raise Refusal("the prompt is empty: give it at least one character", param="prompt")
        return prompt[0]

    def _message(self, message: Fields) -> dict[str, str]:
        role, content = message.take("role", TEXT, ""), message.take("content", Kind("text", self._is_content), "")
        message.left.pop("name", None)
        message.close()
        if role not in ROLES:
            raise Refusal(f"a message's role must be one of {', '.join(ROLES)}, found {role!r:.80}", param="messages")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return {"role": ROLES[role], "content": text}

    @staticmethod
    def _is_content(value: Any) -> bool:
        """A text, or OpenAI's list of parts that are texts."""
        if isinstance(value, str):
            return True
        parts = [part if isinstance(part, dict) else {} for part in several(value)]
        return all(part.get("type") == "text" and TEXT.fits(part.get("text")) for part in parts)

    def _completion(self, body: Fields, encode: Callable[[], list[int]], param: str) -> Order:
        name = body.take("model", TEXT, self.defaults.name)
        if name != self.defaults.name:
            known = f"the model {name!r:.80} does not exist here: there is {self.defaults.name}"
            raise Refusal(known, status=404, param="model", code="model_not_found")
        samples = body.take("n", WHOLE, self.defaults.samples)
        if not 1 <= samples <= MOST_SAMPLES:
            raise Refusal(f"n must be from 1 to {MOST_SAMPLES}, found {samples}", param="n")
        streams = body.take("stream", FLAG, False)
        usage = Fields(body.take("stream_options", OBJECT, {}), "stream_options").take("include_usage", FLAG, False)
        return replace(self._order(body, encode, param), samples=samples, streams=streams, with_usage=usage)

    def _order(self, body: Fields, encode: Callable[[], list[int]], param: str) -> Order:
        """The options that all endpoints share, and then the prompt's ids: the last that can be wrong."""
        draft, params, coupling = self._draft(body), self._params(body), self._coupling(body)
        budget = body.take("max_tokens", WHOLE, self.rules.max_new_tokens)
        budget = body.take("max_completion_tokens", WHOLE, budget)
        stops = several(body.take("stop", STRINGS, list(self.rules.stop_strings)))
        banned = several(body.take("ban", STRINGS, list(self.rules.banned)))
        rules = replace(self.rules, max_new_tokens=budget, stop_strings=stops, banned=banned)
        body.close()
        with self.encoding:
            ids = encode()
        if not ids or max(ids) >= self.defaults.config.vocab_size:
            raise Refusal("the model has no tokens for this prompt", param=param)
        if len(ids) >= self.capacity:
            raise Refusal(
                f"the prompt has {len(ids)} tokens, the context {self.capacity}: shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        rules = replace(rules, max_new_tokens=min(budget, self.capacity - len(ids)))
        return Order(ids, draft, params, rules, coupling)

    def _params(self, body: Fields) -> SamplingParams:
        ours = {field.name: getattr(self.defaults.params, field.name) for field in fields(SamplingParams)}
        kinds = {name: WHOLE if name == "top_k" else NUMBER for name in ours}
        return SamplingParams(**{name: body.take(name, kinds[name], value) for name, value in ours.items()})

    def _coupling(self, body: Fields) -> Coupling:
        name = body.take("coupling", TEXT, self.defaults.coupling)
        if name is not None and name not in COUPLINGS:
            raise Refusal(f"coupling must be one of {', '.join(COUPLINGS)}, found {name!r:.80}", param="coupling")
        return Coupling.of(name, body.take("seed", WHOLE, self.defaults.seed))

    def _draft(self, body: Fields) -> DraftOptions:
        """The drafting asked for. Its plan file and its draft model are the command line's."""
        ours, asked = self.defaults.draft, body.take("draft", TEXT)
        if asked is not None and asked not in self.defaults.drafts:
            raise Refusal(f"draft must be one of {', '.join(self.defaults.drafts)}, found {asked!r:.80}", param="draft")
        kind = asked or ours.kind
        length = {"gamma": WHOLE, "adaptive": FLAG, "min_target_confidence": NUMBER}
        options = {name: body.take(name, kinds, getattr(ours, name)) for name, kinds in length.items()}
        if kind == "none" and ours.kind != "none":  # what the command line says of drafts is no concern of this one
            options = {name: value for name, value in options.items() if value != getattr(ours, name)}
        if (options.get("gamma") or 0) > LONGEST_GAMMA:
            raise Refusal(f"gamma must be at most {LONGEST_GAMMA}, found {options['gamma']}", param="gamma")
        own = ours if kind == ours.kind else DraftOptions(kind="lookup")
        exit_layer, bits = (body.take(name, WHOLE, getattr(own, name)) for name in ("exit_layer", "bits"))
        plan = ours.plan if kind in ("skip", "auto") else None
        draft_model = ours.draft_model if kind == "model" else None
        return DraftOptions(kind, plan, exit_layer, bits, draft_model, **options)
