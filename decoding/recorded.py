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
    """The verbs over uniform numbers that are given: as many as there are tosses, and one for the draw after them."""

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
    """The race under keys that are given, one for each row."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def keys(self, place: Place, rows: int) -> Tensor:
        return self.numbers

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


class RecordedRandomness:
    """A text's randomness ``own`` with recordings of its draw and of the rule of verification that goes with it."""

    def __init__(
        self,
        own: Any,
        rule: Verify,
        recordings: Mapping[int, Recording],
        fill: Callable[[int, Place], None],
    ) -> None:
        """``fill``: puts the chance of so many rows at a place where the recordings find it."""
        self.own, self.rule, self.recordings, self.fill = own, rule, recordings, fill

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def draw(self, probs: Tensor, place: Place) -> Tensor:
        """``Randomness.draw``."""
        recording = self.recordings[DRAW]
        if not recording.takes(probs[None]):
            return self.own.draw(probs, place)
        self.fill(1, place)
        return recording(probs[None])[0]

    def verify(
        self, target_probs: Tensor, draft_probs: Tensor, drafted: Tensor, randomness: Any, place: Place
    ) -> tuple[Tensor, Tensor]:
        """The rule, as ``Verify``; ``randomness`` is this one."""
        given, recording = (target_probs, draft_probs, drafted), self.recordings.get(len(target_probs))
        if recording is None or not recording.takes(*given):
            return self.rule(*given, self.own, place)
        self.fill(len(target_probs), place)
        accepted, token = recording(*given)
        return accepted, token


class Desk:
    """Where recordings find what they compute from, and leave their results: in the first of ``ROWS`` rows."""

    def __init__(self, model: Any) -> None:
        size, device, wide = (ROWS, model.vocab_size), model.device, wide_dtype(model.dtype)
        self.logits = torch.zeros(size, dtype=model.dtype, device=device)
        self.target_probs, self.draft_probs = (torch.zeros(size, dtype=wide, device=device) for _ in range(2))
        self.drafted = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.numbers = {
            Uniforms: torch.zeros(ROWS, dtype=torch.float64, device=device),
            Keys: torch.zeros(ROWS, dtype=torch.int64, device=device),
        }
        self.outcome = torch.zeros(2, dtype=torch.int64, device=device)

    def lay_out(self, first: int) -> None:
        """Rows that are sure of one token each, the first row of token ``first``, and the draft of these tokens."""
        tokens = torch.arange(first, first + ROWS, device=self.drafted.device)
        self.drafted.copy_(tokens % self.logits.shape[1])
        for place, sure in ((self.logits, 1e4), (self.target_probs, 1.0), (self.draft_probs, 1.0)):
            place.zero_().scatter_(1, self.drafted[:, None], sure)


def drawn(given: Any, numbers: Tensor, probs: Tensor) -> Tensor:
    """A draw from a row: ``[1]``."""
    return given(numbers).draw_each(probs, ANYWHERE)


def verified(rule: Verify, given: Any, numbers: Tensor, *rows: Tensor) -> Tensor:
    """How many drafted tokens are accepted, and the token after them: ``[2]``."""
    return torch.stack(rule(*rows, given(numbers), ANYWHERE))


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
        own, rule = chance
        source, given = COUPLED.get(rule, (type(None), None))
        if self.recorder is None or self.trouble or not isinstance(own, source):
            return params, chance
        try:
            found = self.record(self.wanted(params, rule, given, min(rows, ROWS)))
        except RuntimeError as error:
            self.trouble = f"sampling is not recorded as CUDA graphs: {first_cause(error)}"
            return params, chance
        of_params, of_rule = ({n: made for (key, n), made in found.items() if key == each} for each in (params, rule))
        params = RecordedParams(**asdict(params), recordings=of_params)
        numbers = self.desk.numbers[given]
        randomness = RecordedRandomness(own, rule, of_rule, lambda rows, place: given.fill(numbers[:rows], own, place))
        return params, Chance(randomness, randomness.verify)

    def wanted(
        self, params: SamplingParams, rule: Verify, given: Any, rows: int
    ) -> dict[tuple[Any, int], tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]]:
        """The functions to record, each with the tensors that it takes and the one for its result."""
        desk, numbers = self.desk, self.desk.numbers[given]
        p, q = desk.target_probs, desk.draft_probs
        wanted = {(rule, DRAW): (partial(drawn, given, numbers[:1]), (p[:1],), desk.outcome[:1])}
        for n in range(1, rows + 1):
            verify = partial(verified, rule, given, numbers[:n])
            wanted[rule, n] = verify, (p[:n], q[: n - 1], desk.drafted[: n - 1]), desk.outcome
            if params.repetition_penalty == 1:  # else the text matters too
                compute = partial(distribution, context=desk.drafted, params=params)
                wanted[params, n] = compute, (desk.logits[:n],), p[:n]
        return wanted

    def record(self, wanted: dict[tuple[Any, int], Any]) -> dict[tuple[Any, int], Recording]:
        """What is wanted, of which the new ones are recorded. Raises RuntimeError where that fails."""
        if not wanted.keys() <= self.kept.keys():
            self.recorder.make_room()
        found = {key: self.kept.pop(key, None) or self._trusted(*how) for key, how in wanted.items()}
        self.kept |= found
        for key in list(self.kept)[:-MOST]:
            del self.kept[key]
        return found

    def _trusted(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], result: Tensor) -> Recording:
        """A recording that has given what the function gives, of other rows than it was recorded with."""
        self.desk.lay_out(0)
        recording = Recording(self.recorder, function, inputs, result)
        self.desk.lay_out(1)
        expected = function(*inputs)
        if not torch.equal(recording(*inputs), expected):
            raise RuntimeError("what was recorded computes something else")
        return recording


RECORDINGS: WeakKeyDictionary[Model, Recordings] = WeakKeyDictionary()


def recordings_of(model: Model) -> Recordings:
    """Those of a target: one set for all texts of a process."""
    if model not in RECORDINGS:
        RECORDINGS[model] = Recordings(model)
    return RECORDINGS[model]
