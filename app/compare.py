"""Comparison of speculation with plain decoding: speed-up, and equality of the texts."""

from collections.abc import Sequence
from statistics import median

from app.writer import Sample, Task, Writer
from decoding.rounds import common_prefix

TURNS = 3  # a text is written both ways, one after the other, at least this often
MOST_TURNS = 20
# below this number of tokens, or of seconds of all turns, noise is larger than the difference
FEW_TOKENS = 48
SHORT = 0.5
UNSTEADY = 2.0  # ratio of the largest speed-up to the smallest, from which a line warns


def comparison(writer: Writer, task: Task) -> str:
    """Median speed-up over plain decoding with its range, and whether the texts are equal.

    The text of the ``task`` has been written. In greedy decoding and under the race the plain text
    must equal it. Under the ratio rule the two have the same law, if the drafter states its q
    truly.
    """
    if task.drafting.new_policy().gamma == 0:
        return "[both ways are plain decoding: there is no speed-up to measure]"
    tokens = task.sample.statistics.tokens
    most = TURNS if tokens < FEW_TOKENS else MOST_TURNS
    turns: list[list[Sample]] = []
    while len(turns) < TURNS or (len(turns) < most and shortest(turns) < SHORT):
        turns.append([writer.again(task, way) for way in (task.drafting, writer.plain)])
    if task.params.temperature and task.coupling.name == "ratio":
        texts = "another text of the same law, if the drafter states its q truly"
    else:
        texts = difference(task.sample.tokens, turns[0][1].tokens, writer.model.why_rows_vary)
    if tokens < FEW_TOKENS:
        return f"[{texts}; too short to compare speeds: {tokens} tokens]"
    ratios = [drafted.speed / plain.speed for drafted, plain in turns]
    spread = f"medians of {len(turns)} turns, {min(ratios):.2f}-{max(ratios):.2f}"
    drafted_speed = median(drafted.speed for drafted, _ in turns)
    plain_speed = median(plain.speed for _, plain in turns)
    if max(ratios) > UNSTEADY * min(ratios):
        spread += "; the turns differ much: compare again on an idle machine"
    return (
        f"[{median(ratios):.2f} times plain decoding, {drafted_speed:.1f} against"
        f" {plain_speed:.1f} tokens/s"
        f" ({spread}), {texts}]"
    )


def shortest(turns: Sequence[Sequence[Sample]]) -> float:
    """Seconds of all turns, of the way that takes less."""
    return min(sum(sample.seconds for sample in way) for way in zip(*turns, strict=True))


def difference(drafted: Sequence[int], plain: Sequence[int], why_rows_vary: str | None) -> str:
    """Whether two texts that should be equal are so, else the first token that differs."""
    if drafted == plain:
        return "same text"
    why = why_rows_vary or "a defect: here steps do not depend on length"
    return f"the texts differ from token {common_prefix(drafted, plain)} on ({why})"
