"""Session: a loaded model that writes texts: one after another, several at once, or in a chat.

Everything that writes uses it: the command line, Python, the server, the benchmark and the search.
Knows nothing of screens, sockets and argument lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from reprlib import repr as shortened
from typing import TYPE_CHECKING

import torch

from app.characters import Labels, TextStream
from app.command_line import say
from app.device import pick_device
from app.drafts import draft_of, optional_plans, plan_for
from app.options import GRAMMARS, OF_THE_MODEL, Options
from app.plan_file import LONGEST_DRAFT
from app.prompt import Messages, checked_prompt, encode_chat, encode_prompt, read_grammar
from decoding.model_port import Model
from decoding.rounds import Round, Statistics, common_prefix
from decoding.speculate import Observer, speculate
from decoding.text import DeadEnd, Rules, Text
from decoding.verify import Rule
from model.cache import KVCache
from model.decoder import Decoder
from model.device import now
from model.errors import InputError
from model.plan import LayerPlan
from weights.importance import importance
from weights.load import load_model, model_folder, pick_dtype, read_config, shown_name
from weights.memory import Memory, check_fits, estimate, free_bytes, low_bit_bytes
from weights.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.chat import Chat
    from decoding.auto import Costs, Estimates
    from decoding.grammar import Vocabulary

POSITIONS = 1024  # a cache is made for a multiple of these
# Positions of a cache for texts that are not known yet: on a GPU a step attends over all of them.
CONTEXT = 8192
MOST_TOGETHER = 16  # texts that share steps
WARM_UP = 8  # tokens that are written before anything is timed


@dataclass
class Slot:
    """A KV cache, and the tokens whose entries it holds: ``prompt``, then the text after it.

    ``draft_caches`` are those of draft models, by name.
    """

    cache: KVCache
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft_caches: dict[str, KVCache] = field(default_factory=dict)


@dataclass
class Sample:
    """A text that is being written or is finished, in the way of its ``options``.

    ``draft`` is the name of the draft; ``is_plain``: nothing can be drafted. ``timeline`` has each
    round with the seconds of decoding so far, without those of the prompt. ``continues``: whether
    the prompt is read from the longest prefix on that its cache holds. ``trouble`` tells why steps
    fell back to the readable blocks, if so.
    """

    source: Text
    options: Options
    rule: Rule
    draft: str = ""
    is_plain: bool = False
    timeline: list[tuple[Round, float]] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    continues: bool = False
    trouble: str | None = None

    def __repr__(self) -> str:
        return f"Sample({shortened(self.text)}, {self.finish}, {self.speed:.1f} tokens/s)"

    @property
    def text(self) -> str:
        """The output, up to the stop string; bytes that are no UTF-8 become U+FFFD."""
        return self.source.written

    @property
    def tokens(self) -> list[int]:
        """Ids of the output, including the token that ended it."""
        return self.source.generated

    @property
    def finish(self) -> str:
        """Why the text ended: "eos", "stop", "length", or "interrupted"."""
        return self.source.finish or "interrupted"

    @property
    def rounds(self) -> list[Round]:
        """The rounds in which the text was written."""
        return [round for round, _ in self.timeline]

    @property
    def seconds(self) -> float:
        """Seconds of decoding."""
        return self.timeline[-1][1] if self.timeline else 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return self.statistics.tokens / self.seconds if self.seconds else 0.0


class ContextFull(InputError):
    """Error of a prompt or a conversation that is longer than its context."""


class Session:
    """A model that writes by ``write``, ``stream``, ``write_all`` and ``chat``. Options of a call
    stand in place of those that the session was made with.

    The weights are loaded when they are first used. One text is written at a time: a call ends a
    stream that has not ended. ``sample`` is the last text that ``write`` or ``stream`` began.
    """

    def __init__(self, options: Options, model: Decoder | None = None) -> None:
        """``model`` is a loaded one, by default that of the options. Raises InputError."""
        self.options = options
        self.folder = model_folder(options.model, options.revision)
        self.name = shown_name(self.folder)
        self.device = pick_device(options.device)
        self.config = read_config(self.folder)
        self.dtype = pick_dtype(options.dtype, self.folder, self.device)
        self.tokenizer = Tokenizer(self.folder)
        self.labels = Labels(self.tokenizer.token_bytes, self.tokenizer.special)
        self.mask_seconds = math.inf  # longest that all masks of a text's grammar may take
        self.slot: Slot | None = None
        self.sample: Sample | None = None
        self.streaming: Generator[str, None, None] = (piece for piece in ())
        self.draft_models: dict[str, Decoder] = {}
        self.prepared: set[LayerPlan] = set()
        # of all texts that no draft length can change
        self.estimates: Estimates | None = None
        self.costs: dict[tuple[LayerPlan, ...], Costs] = {}
        if model is not None:
            self.model = model

    @cached_property
    def model(self) -> Decoder:
        """The model, loaded and prepared."""
        return accelerated(load_model(self.folder, self.dtype, self.device), self.options)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens, as grammars read them."""
        from decoding.grammar import Vocabulary

        tokens = [self.tokenizer.token_bytes(token) for token in range(self.config.vocab_size)]
        return Vocabulary(tokens, self.tokenizer.eos_ids, self.tokenizer.encode_continuation)

    @property
    def context(self) -> int:
        """Most positions of any text: --context, at most the model's."""
        return min(self.options.context or math.inf, self.config.max_positions)

    def capacity(self, ids: Sequence[int] = ()) -> int:
        """Return the positions of a cache: for a prompt and its output or, where texts are not
        known yet, for the context, of at most ``CONTEXT`` unless --context is given.
        """
        wanted = len(ids) + self.options.max_new_tokens if ids else self.options.context or CONTEXT
        return min(wanted, self.context)

    def memory(self, positions: int, prompt: int = 0) -> Memory:
        """Return the memory that texts of up to ``positions`` tokens take.

        The plans of ``auto`` are not counted: they are used only if their low-bit copies fit.
        Raises InputError for a draft model or a plan that cannot be read.
        """
        options = self.options
        chosen = plan_for(options, self.folder, self.config.num_layers)
        of_draft = options.draft_model and read_config(model_folder(options.draft_model))
        needs = {
            "dtype": self.dtype,
            "positions": positions,
            "prompt": prompt,
            "draft_config": of_draft,
            "longest_draft": LONGEST_DRAFT if options.gamma is None else options.gamma,
            "plan": chosen.plan if chosen and options.draft != "auto" else None,
        }
        return estimate(self.config, **needs, fast_on=self.device)

    def check_memory(self, ids: Sequence[int] = ()) -> str:
        """Return a line of needed and free memory. Raises InputError with it where that is too
        small.
        """
        copies = 0
        if self.options.draft == "auto":
            plans = optional_plans(self.options, self.folder, self.config.num_layers)
            copies = sum(low_bit_bytes(self.config, chosen.plan) for chosen in plans.values())
        memory = self.memory(self.capacity(ids), len(ids))
        return check_fits(memory, self.device, optional_copies=copies)

    def prepare(self, plan: LayerPlan) -> None:
        """Make the low-bit copies of a plan, before anything is timed."""
        if plan in self.prepared:
            return
        if plan.has_low_bits and self.model.abilities.low_bits:
            importance(self.model, self.tokenizer, self.folder)
        self.model.prepare(plan)
        self.prepared.add(plan)

    def merged(self, *calls: dict[str, object]) -> Options:
        """Return the session's options, with those of each call in their place."""
        options = self.options
        for given in calls:
            if fixed := [name for name in OF_THE_MODEL if name in given]:
                raise InputError(f"{fixed[0]} is an option of load, not of a call", fixed[0])
            options = options.merged(given)
        return options

    def encode(self, prompt: str, options: Options | None = None) -> list[int]:
        """Return the token ids of a prompt. Raises InputError for anything but text, and for a
        prompt that is too long for the context.
        """
        ids = encode_prompt(self.tokenizer, checked_prompt(prompt), options or self.options)
        return self.fitting(ids)

    def encode_messages(self, messages: Messages, options: Options | None = None) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the next answer."""
        return self.fitting(encode_chat(self.tokenizer, messages, options or self.options))

    def fitting(self, ids: list[int]) -> list[int]:
        """Return these token ids. Raises InputError for ids outside the model's vocabulary, and for
        as many as the context or more.
        """
        if not ids or max(ids) >= self.config.vocab_size:
            raise InputError(
                f"{self.folder}: the tokenizer does not belong to this model: it gives no ids, or"
                " ids that the model lacks"
            )
        if len(ids) >= self.context:
            used = self.context < self.config.max_positions
            raise ContextFull(
                f"the prompt has {len(ids)} tokens, the model's context"
                f" {self.config.max_positions} tokens{f', {self.context} are used' * used}:"
                f" shorten the prompt{' or raise --context' * used}"
            )
        return ids

    def begin(self, ids: Sequence[int], options: Options | None = None, number: int = 0) -> Sample:
        """Return a text that holds its prompt only; ``number`` is that of several samples, which
        have random numbers of their own.
        """
        options = (options or self.options).seeded()
        kind = next((name for name in GRAMMARS if getattr(options, name) is not None), None)
        constraints = []
        if kind:
            from decoding.grammar import Grammar

            source = read_grammar(kind, options)
            grammar = Grammar(GRAMMARS[kind], source, self.vocabulary, self.mask_seconds)
            constraints.append(grammar(len(ids)))
        budget = min(options.max_new_tokens, self.context - len(ids))
        eos_ids = self.tokenizer.eos_ids
        rules = Rules(budget, eos_ids, options.stop, options.ban, constraints)
        text = Text(ids, rules, self.model, self.tokenizer.token_bytes)
        return Sample(text, options, replace(options.rule, sample=number))

    def new_slot(self, capacity: int) -> Slot:
        """Return an empty cache of this many positions."""
        cache = self.model.new_cache(capacity)
        self.model.step_of(cache)
        return Slot(cache)

    def slot_for(self, positions: int) -> Slot:
        """Return the session's own cache, made anew where it is too small."""
        if self.slot is None or self.slot.cache.capacity < positions:
            rounded_up = -(-positions // POSITIONS) * POSITIONS
            self.slot = self.new_slot(min(rounded_up, self.model.max_positions))
        return self.slot

    @torch.inference_mode()
    def read(self, sample: Sample, slot: Slot, target: Model) -> None:
        """Read the prompt of a text, all but its last token, into a cache.

        Nothing is read of a prompt that the cache holds. A text that ``continues`` is read from the
        longest common prefix on, and so may differ in rounding from one that is read anew.
        """
        prompt = sample.source.tokens
        if sample.continues:
            at = common_prefix(slot.tokens[: slot.cache.length], prompt[:-1])
        else:
            at = len(prompt) - 1 if slot.prompt == prompt else 0
        slot.prompt = []  # the cache may hold anything, if this is interrupted
        slot.tokens = slot.tokens[:at]
        slot.cache.truncate(at)
        if unread := prompt[at:-1]:
            target.prefill(torch.tensor([unread], device=self.device), slot.cache, at)
        slot.prompt = [] if sample.continues else [*prompt]
        slot.tokens = prompt[:-1]

    def rounds(
        self,
        sample: Sample,
        slot: Slot | None = None,
        target: Model | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Round]:
        """Read the prompt of a text and write it to its end; yields the rounds.

        The time between two rounds is not counted. ``target`` is the model as the loop calls it,
        which differs from the session's where several texts share steps. Raises InputError.
        """
        text = sample.source
        slot = slot or self.slot_for(text.longest)
        target = target or self.model
        self.read(sample, slot, target)
        way = draft_of(self, sample, slot, target)
        sample.draft = way.name
        sample.is_plain = way.policy.gamma == 0
        rounds = speculate(
            target,
            slot.cache,
            text,
            way.drafter,
            way.policy,
            sample.options.params,
            sample.rule.randomness(self.device),
            sample.rule.verify,
            observer=observer,
        )
        began = now(self.device)
        while round := self._next(rounds, text):
            sample.timeline.append((round, sample.seconds + now(self.device) - began))
            sample.trouble = self.model.trouble  # a step may have fallen back
            sample.statistics.add(round)
            slot.tokens = text.tokens[:-1]
            yield round
            began = now(self.device)

    def _next(self, rounds: Iterator[Round], text: Text) -> Round | None:
        """Return the next round; None at the end. A dead end is told with the grammar's reason."""
        try:
            return next(rounds, None)
        except DeadEnd:
            for constraint in text.constraints:
                if trouble := constraint.trouble_after(text.tokens):
                    raise DeadEnd(trouble) from None
            raise

    def finish(self, sample: Sample) -> Sample:
        """Write a text to its end, and return it."""
        for _ in self.rounds(sample):
            pass
        return sample

    def warm_up(self, ids: Sequence[int], options: Options | None = None) -> None:
        """Write a few tokens, with the draft and without, before anything is timed."""
        options = options or self.options
        few = min(WARM_UP, options.max_new_tokens)
        for draft in ({}, {"draft": "none"}):
            self.finish(self.begin(ids, options.merged({"max_new_tokens": few, **draft})))

    def write(self, prompt: str, **options: object) -> Sample:
        """Return the text after a prompt. Raises InputError."""
        for _ in self.stream(prompt, **options):
            pass
        return self.sample

    def stream(self, prompt: str, **options: object) -> Iterator[str]:
        """Return the text after a prompt, in pieces as they are written. Raises InputError."""
        self.streaming.close()
        given = self.merged(options)
        self.sample = self.begin(self.encode(prompt, given), given)
        self.streaming = self.pieces(self.sample)
        return self.streaming

    def pieces(self, sample: Sample, slot: Slot | None = None) -> Generator[str, None, None]:
        """Write a text, and yield it in pieces."""
        stream = TextStream(sample.source)
        for _ in self.rounds(sample, slot):
            if piece := stream.pull():
                yield piece

    def write_all(self, prompts: Sequence[str], **options: object) -> list[Sample]:
        """Return a text after each prompt, written in shared steps where the device has them.

        Greedy texts are those of ``write``. Sampled ones have random numbers of their own, by the
        seed and their place in the list. Raises InputError.
        """
        self.streaming.close()
        if not isinstance(prompts, list | tuple):
            raise InputError(f"prompts must be a list of strings, found {prompts!r:.80}")
        given = self.merged(options)
        given = given.seeded()
        ids = [self.encode(prompt, given) for prompt in prompts]
        samples = [self.begin(each, given, number) for number, each in enumerate(ids)]
        self.finish_all(samples)
        return samples

    def finish_all(
        self,
        samples: Sequence[Sample],
        see: Callable[[Sample, Round], None] = lambda sample, round: None,
    ) -> None:
        """Write texts to their ends, together where they share steps; ``see`` is called with each
        round. The first error is raised when all have ended.
        """
        positions = max((sample.source.longest for sample in samples), default=1)
        count = self.slots_for(len(samples), positions)
        if count == 1:
            for sample in samples:
                for round in self.rounds(sample):
                    see(sample, round)
            return
        from decoding.together import Together

        together = Together(self.model)
        free = [self.new_slot(positions) for _ in range(count)]
        prompt = samples[0].source.tokens
        if all(sample.source.tokens == prompt for sample in samples):  # read once
            self.read(samples[0], free[0], self.model)
            for slot in free[1:]:
                slot.cache.copy_from(free[0].cache, len(prompt) - 1)
                slot.prompt = [*prompt]
                slot.tokens = prompt[:-1]
        waiting = [*samples]
        errors: list[InputError] = []

        def write(sample: Sample) -> None:
            slot = free.pop()
            try:
                for round in self.rounds(sample, slot, together):
                    see(sample, round)
            except InputError as error:
                errors.append(error)
            finally:
                free.append(slot)

        try:
            while waiting or together.loops:
                while waiting and free:
                    together.start(lambda: write(waiting.pop(0)))
                together.step()
        finally:
            for loop in [*together.loops]:
                together.stop(loop)
        if errors:
            raise errors[0]

    def slots_for(self, texts: int, positions: int) -> int:
        """Return how many texts are written at once: as many as share steps and fit into memory."""
        if texts < 2 or not self.model.abilities.shares_steps:
            return 1
        memory = self.memory(positions)
        fitting = free_bytes(self.device) // (memory.cache + memory.workspace)
        return max(1, min(texts, MOST_TOGETHER, fitting))

    def chat(self, **options: object) -> Chat:
        """Return a new conversation, with a cache of its own."""
        from app.chat import Chat

        return Chat(self, options)


def accelerated(model: Decoder, options: Options) -> Decoder:
    """Return the model with fast steps, where ``model.fast`` is there and has any."""
    if options.no_compile:
        if model.device.type == "cuda":
            torch.compiler.set_stance("force_eager")  # of sampling too
        return model
    with suppress(ModuleNotFoundError):
        from model.fast import accelerate

        return accelerate(model)
    say("steps are the readable blocks', several times slower: model/fast is not there")
    return model


def load(model: str = "smollm2-135m-instruct", **options: object) -> Session:
    """Return a loaded model, with the options of the command line: see ``Session``."""
    session = Session(Options().merged({"model": model, **options}))
    session.check_memory()
    _ = session.model
    return session
