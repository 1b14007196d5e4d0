"""Distribution, draw and verification as a GPU replays them: one launch each, where they take a dozen or more.

These are the functions of ``sampling``, ``randomness`` and ``verify`` themselves, recorded for every number of rows
that a round may have. Chance comes to them in a buffer, which is filled outside as it is without recordings, so that a
seed gives the same text either way. What was not recorded (a repetition penalty, constraints, a longer draft) is
computed by the functions as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from decoding.model_port import Model
from decoding.randomness import KeyedRandomness, Place, SeededRandomness
from decoding.sampling import SamplingParams, distribution
from decoding.verify import Chance, Verify, verify_by_race, verify_by_ratio
from model.fast.graphs import ROWS
from model.fast.recorder import Recording, first_cause
from model.layers import wide_dtype

ANYWHERE = Place(0)  # for a randomness whose numbers are given
DRAW = 0  # under this number of rows the draw of one token is kept; under others, verifications
MOST = 256  # recordings kept; those that were not asked for longest go first


class Uniforms(SeededRandomness):
    """The verbs over given uniform numbers: one for each toss, and one for the draw after them."""

    def __init__(self, numbers: Tensor) -> None:
        self.left = numbers

    def uniform(self, count: int, out: Tensor | None = None) -> Tensor:
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    @staticmethod
    def fill(numbers: Tensor, randomness: SeededRandomness, place: Place) -> None:
        """In two calls, as without recordings: what a GPU's generator gives depends on how many are asked for."""
        if len(numbers) > 1:
            randomness.uniform(len(numbers) - 1, out=numbers[:-1])
        randomness.uniform(1, out=numbers[-1:])


class Keys(KeyedRandomness):
    """The race under given keys, one for each row."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def keys(self, place: Place, rows: int) -> Tensor:
        return self.numbers[:rows]

    @staticmethod
    def fill(numbers: Tensor, randomness: KeyedRandomness, place: Place) -> None:
        numbers.copy_(randomness.keys(place, len(numbers)), non_blocking=True)


# What draws by a rule, and what stands for it in a recording.
COUPLED: dict[Verify, tuple[type, Any]] = {
    verify_by_ratio: (SeededRandomness, Uniforms),
    verify_by_race: (KeyedRandomness, Keys),
}


@dataclass(frozen=True)
class RecordedParams(SamplingParams):
    """Sampling parameters with recordings of their ``distribution``, by the number of rows."""

    recordings: Mapping[int, Recording] = field(default_factory=dict, compare=False, repr=False)

    def replay(self, logits: Tensor) -> Tensor | None:
        recording = self.recordings.get(len(logits))
        return recording(logits) if recording and recording.takes(logits) else None


@dataclass(frozen=True)
class RecordedRandomness:
    """A text's randomness ``own`` with recordings of its draw, and of its rule of verification by the number of rows.

    They find the chance that they take among ``numbers`` ``[ROWS]``, where ``given`` puts it.
    """

    own: Any
    rule: Verify
    given: Any
    numbers: Tensor
    drawing: Recording
    verifying: Mapping[int, Recording]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """``Randomness.draw``."""
        if not self.drawing.takes(probs[None]):
            return self.own.draw(probs, place)
        self.given.fill(self.numbers[:1], self.own, place)
        return self.drawing(probs[None])[0]

    def verify(
        self, target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Any, place: Place
    ) -> tuple[Tensor, Tensor]:
        """The rule, as ``Verify``; ``randomness`` is this one."""
        rows, recording = (target_probs, draft_probs, drafted), self.verifying.get(len(target_probs))
        if recording is None or not recording.takes(*rows):
            return self.rule(*rows, self.own, place)
        self.given.fill(self.numbers[: len(target_probs)], self.own, place)
        accepted, token = recording(*rows)
        return accepted, token


class Desk:
    """Where recordings find what they compute from, and leave their results: in the first of ``ROWS`` rows."""

    def __init__(self, model: Any) -> None:
        size, device, wide = (ROWS, model.vocab_size), model.device, wide_dtype(model.dtype)
        self.logits = torch.zeros(size, dtype=model.dtype, device=device)
        self.target_probs, self.draft_probs = (torch.zeros(size, dtype=wide, device=device) for _ in range(2))
        self.drafted, self.keys = (torch.zeros(ROWS, dtype=torch.int64, device=device) for _ in range(2))
        self.uniforms = torch.zeros(ROWS, dtype=torch.float64, device=device)
        self.outcome = torch.zeros(2, dtype=torch.int64, device=device)

    def lay_out(self, first: int) -> None:
        """Rows that are sure of one token each, the first row of token ``first``, and the draft of these tokens."""
        tokens = torch.arange(first, first + ROWS, device=self.drafted.device)
        self.drafted.copy_(tokens % self.logits.shape[1])
        for place, sure in ((self.logits, 1e4), (self.target_probs, 1.0), (self.draft_probs, 1.0)):
            place.zero_().scatter_(1, self.drafted[:, None], sure)


class Recordings:
    """What has been recorded for the texts of a target; nothing where its steps are not recorded either.

    ``trouble`` says why recording has failed: all goes on without then.
    """

    def __init__(self, model: Model) -> None:
        self.recorder = getattr(model, "recorder", None)
        self.desk = Desk(model) if self.recorder else None
        self.kept: dict[tuple[Any, int], Recording] = {}
        self.trouble: str | None = None

    @torch.inference_mode()
    def of(self, params: SamplingParams, chance: Chance, rows: int) -> tuple[SamplingParams, Chance]:
        """The same parameters and chance, with recordings for up to so many rows: made now, while no text is timed."""
        (own, rule), desk = chance, self.desk
        source, given = COUPLED.get(rule, (type(None), None))
        if desk is None or self.trouble or not isinstance(own, source):
            return params, chance
        numbers, p, q = desk.keys if given is Keys else desk.uniforms, desk.target_probs, desk.draft_probs

        def verified(*rows: Tensor) -> Tensor:
            return torch.stack(rule(*rows, given(numbers), ANYWHERE))

        def drawn(probs: Tensor) -> Tensor:
            return given(numbers).draw_each(probs, ANYWHERE)

        counts = range(1, min(rows, ROWS) + 1)
        probable = partial(distribution, context=desk.drafted, params=params)
        unpenalised = counts if params.repetition_penalty == 1 else ()  # else the text matters too
        try:
            draw = self._recorded((rule, DRAW), drawn, desk.outcome[:1], p[:1])
            verifications = {
                n: self._recorded((rule, n), verified, desk.outcome, p[:n], q[: n - 1], desk.drafted[: n - 1])
                for n in counts
            }
            probs = {n: self._recorded((params, n), probable, p[:n], desk.logits[:n]) for n in unpenalised}
        except RuntimeError as error:
            self.trouble = f"sampling is not recorded as CUDA graphs: {first_cause(error)}"
            return params, chance
        randomness = RecordedRandomness(own, rule, given, numbers, draw, verifications)
        return RecordedParams(**asdict(params), recordings=probs), Chance(randomness, randomness.verify)

    def _recorded(
        self, key: tuple[Any, int], function: Callable[..., Tensor], result: Tensor, *inputs: Tensor
    ) -> Recording:
        """What is kept under this key, or was recorded now. Raises RuntimeError where that fails.

        A recording is kept only if it has given what the function gives, of other rows than it was recorded with.
        """
        made = self.kept.pop(key, None)
        if made is None:
            self.recorder.make_room()
            self.desk.lay_out(0)
            made = Recording(self.recorder, function, inputs, result)
            self.desk.lay_out(1)
            expected = function(*inputs)
            if not torch.equal(made(*inputs), expected):
                raise RuntimeError("what was recorded computes something else")
        self.kept[key] = made
        if len(self.kept) > MOST:
            del self.kept[next(iter(self.kept))]
        return made


RECORDINGS: WeakKeyDictionary[Model, Recordings] = WeakKeyDictionary()


def recordings_of(model: Model) -> Recordings:
    """Those of a target: one set for all texts of a process."""
    if model not in RECORDINGS:
        RECORDINGS[model] = Recordings(model)
    return RECORDINGS[model]
