"""Several texts at once, in steps that they share.

Knows nothing of how a single text is written.
"""

from collections.abc import Callable, Iterator, Sequence

from app.sample import Sample, Slot
from decoding.rounds import Round
from decoding.together import Together
from model.decoder import Decoder
from model.errors import InputError


def rounds_together(
    rounds: Callable[[Sample, Slot, Together], Iterator[Round]],
    model: Decoder,
    samples: Sequence[Sample],
    slots: Sequence[Slot],
) -> Iterator[tuple[Sample, Round]]:
    """Write texts to their ends by ``rounds``, as many at a time as there are slots; yields each
    text's rounds.

    A prompt that all share is read once. The first error is raised when all texts have ended.
    """
    first, *others = slots
    prompt = samples[0].source.tokens
    if all(sample.source.tokens == prompt for sample in samples):
        first.read(samples[0], model)
        for slot in others:
            slot.copy_from(first)
    together = Together(model)
    waiting = [*samples]
    free = [*slots]
    written: list[tuple[Sample, Round]] = []
    errors: list[InputError] = []

    def write(sample: Sample) -> None:
        slot = free.pop()
        try:
            for round in rounds(sample, slot, together):
                written.append((sample, round))
        except InputError as error:
            errors.append(error)
        finally:
            free.append(slot)

    try:
        while waiting or together.loops:
            while waiting and free:
                together.start(lambda: write(waiting.pop(0)))
            together.step()
            yield from written
            written.clear()
    finally:
        for loop in [*together.loops]:
            together.stop(loop)
    if errors:
        raise errors[0]
