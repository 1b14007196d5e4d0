"""Writer of texts: a prepared target with its cache, which reads a prompt and writes texts after it, by a ``Drafting``.

``generate.py``, the server, the benchmark and the search's confirmation write through it, and so time the same.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch

from decoding.drafters import Drafter, ModelDrafter, NoDraft
from decoding.policies import FixedLength, Policy
from decoding.rounds import Round, Statistics
from decoding.run.plan_file import DraftPlan
from decoding.sampling import SamplingParams
from decoding.speculate import Observer, speculate
from decoding.text import Rules, Text, TokenBytes
from decoding.verify import Coupling
from model import Decoder, KVCache, LayerPlan
from model.clock import now

GAMMA = 4  # tokens drafted per round by default
WARM_UP_TOKENS = 4  # least number of tokens written before anything is timed

Reader = Callable[[Round, float], None]  # called with each round and the seconds of decoding so far


@dataclass(frozen=True)
class Drafting:
    """A drafter and its policy.

    ``name`` is for people; ``new_drafter`` takes the target's cache, which the drafter may share; ``new_policy`` makes
    a fresh policy for a text. ``model`` drafts: the target, under the ``chosen`` plan, or a draft model, or None.
    """

    name: str
    new_drafter: Callable[[KVCache], Drafter]
    new_policy: Callable[[], Policy] = lambda: FixedLength(GAMMA)
    model: Decoder | None = None
    chosen: DraftPlan | None = None

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan under which the target drafts for itself; None where it does not."""
        return self.chosen and self.chosen.plan


def plain(model: Decoder, name: str = "plain") -> Drafting:
    """Plain decoding: an empty draft."""
    return Drafting(name, lambda cache: NoDraft(model.vocab_size, model.device), lambda: FixedLength(0))


def make_steps(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> None:
    """Make the static steps of a model that has them, before any text is timed."""
    if step := getattr(model, "step_of", None):
        step(cache, plan or LayerPlan.full(model.num_layers))


def model_drafter(model: Decoder, cache: KVCache, plan: LayerPlan | None = None) -> ModelDrafter:
    """A drafter with its steps made."""
    make_steps(model, cache, plan)
    return ModelDrafter(model, cache, plan)


@dataclass
class Sample:
    """A text with its rounds, and the seconds of decoding, without the prompt's prefill."""

    text: Text
    rounds: list[Round] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0
    interrupted: bool = False  # by Ctrl-C, possibly after its last token, or since its reader has left
    trouble: str | None = None  # the reason why the model runs without CUDA graphs

    @property
    def finish(self) -> str:
        """Why the text ended: "eos", "stop", "length", or "interrupted"."""
        return self.text.finish or "interrupted"

    @property
    def tokens_per_second(self) -> float:
        return self.statistics.tokens / self.seconds if self.seconds else 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a text was written; ``sample`` is the text so far."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample


class Writer:
    """A target with one cache for all prompts, and one drafter per drafting.

    So steps that were made for them, such as CUDA graphs, serve every text.
    """

    # On several processes rank 0 decides: ``decoding.run.ranks`` replaces this.
    decide = staticmethod(lambda policy, randomness, verify: (randomness, verify))

    def __init__(self, model: Decoder, capacity: int, token_bytes: TokenBytes = lambda token: b"") -> None:
        """``capacity``: positions of the cache, for the longest prompt with its output."""
        self.model, self.capacity, self.token_bytes = model, capacity, token_bytes
        self.cache: KVCache = model.new_cache(capacity)
        make_steps(model, self.cache)
        self.drafters: dict[Callable[[KVCache], Drafter], Drafter] = {}
        self.prompt: list[int] = []
        self.plain = plain(model)

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int]) -> float:
        """Read a prompt, all but its last token, into the cleared cache; returns the seconds this took.

        A draft model reads it into its cache when it first drafts.
        """
        began = self.clock()
        self.prompt = list(prompt)
        self.cache.truncate(0)
        for drafter in self.drafters.values():
            drafter.rollback(0)
        ids = torch.tensor([self.prompt[:-1]], dtype=torch.int64, device=self.model.device)
        self.model.prefill(ids, self.cache)
        return self.clock() - began

    def new_text(self, rules: Rules) -> Text:
        """A text that holds only the prompt."""
        return Text(self.prompt, rules, self.model, self.token_bytes)

    def clock(self) -> float:
        """The clock of decoding, in seconds."""
        return now(self.model.device)

    def drafter(self, drafting: Drafting) -> Drafter:
        """The drafter of a drafting, one for all texts."""
        if drafting.new_drafter not in self.drafters:
            self.drafters[drafting.new_drafter] = drafting.new_drafter(self.cache)
        return self.drafters[drafting.new_drafter]

    def write(
        self,
        text: Text,
        drafting: Drafting,
        params: SamplingParams,
        coupling: Coupling,
        *,
        policy: Policy | None = None,
        readers: Sequence[Reader] = (),
        observer: Observer | None = None,
    ) -> Sample:
        """Write a text, which holds the prompt, to its end. Raises Interrupted on Ctrl-C.

        ``policy`` is a new one of the drafting by default. The time of the ``readers`` is not counted.
        """
        sample, policy, drafter = Sample(text), policy or drafting.new_policy(), self.drafter(drafting)
        drawn = self.decide(policy, coupling.randomness(self.model.device), coupling.verify)
        rounds = speculate(self.model, self.cache, text, drafter, policy, params, *drawn, observer=observer)
        try:
            with closing(rounds):
                began = self.clock()
                for round in rounds:
                    sample.seconds += self.clock() - began
                    sample.rounds.append(round)
                    sample.statistics.add(round)
                    for read in readers:
                        read(round, sample.seconds)
                    began = self.clock()
        except KeyboardInterrupt:
            sample.interrupted = True
            raise Interrupted(sample) from None
        finally:
            sample.trouble = getattr(self.model, "trouble", None)
        return sample

    def warm_up(self, drafting: Drafting, params: SamplingParams) -> None:
        """Write a few tokens, with the draft and without, before anything is timed.

        There are enough for a draft of full length and the token after it, as far as the cache reaches.
        """
        wanted = max(WARM_UP_TOKENS, drafting.new_policy().gamma + 2)
        rules = Rules(min(wanted, self.capacity - len(self.prompt)))
        for way in (drafting, self.plain):
            self.write(self.new_text(rules), way, params, Coupling("ratio", 0))
