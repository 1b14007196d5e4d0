"""Costs of a model's steps: of verifications, and of the steps of a draft.

Knows nothing of prompts.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from app.common.table import Row
from benchmark.timing import spread, take_turns
from decoding.drafters import ModelDrafter
from model.cache import KVCache
from model.decoder import Decoder

ROWS = (1, 2, 4, 8, 16)  # tokens of a verification
DRAFTED = 4  # draft steps, one after another
TURNS = 15


class Step(NamedTuple):
    """What is timed: ``count`` steps of ``rows`` tokens each, one after another, by the model of a
    drafter.
    """

    name: str
    drafter: ModelDrafter
    rows: int = 1
    count: int = 1

    def run(self, turn: int) -> None:
        """Run the steps from position 0 on, each up to the choice of the likeliest token, which the
        host reads. The cache forgets them. All turns are alike.
        """
        drafter = self.drafter
        tokens = torch.zeros(1, self.rows, dtype=torch.int64, device=drafter.model.device)
        for start in range(0, self.rows * self.count, self.rows):
            drafter.model(tokens, drafter.cache, start, drafter.plan)[0, -1].argmax().item()
        drafter.cache.truncate(0)


@torch.inference_mode()
def measure_steps(
    model: Decoder, cache: KVCache, drafters: Mapping[str, ModelDrafter]
) -> tuple[list[Row], list[Row]]:
    """Return the costs of verifications by a model, one for each of ``ROWS``, and those of draft
    steps, in its plain steps.
    """
    target = ModelDrafter(model, cache)
    steps = [Step("verification", target, rows=rows) for rows in ROWS]
    steps += [
        Step(f"draft step, {name}", drafter, count=DRAFTED) for name, drafter in drafters.items()
    ]
    runs = take_turns({step: step.run for step in steps}, range(TURNS), model.device)
    ms = {step: spread(1e3 * took / step.count for _, took in own) for step, own in runs.items()}
    plain = ms[steps[0]]["median"]
    rows: list[Row] = [
        {"step": step.name, "tokens": step.rows, "plain rounds": each["median"] / plain, "ms": each}
        for step, each in ms.items()
    ]
    return rows[: len(ROWS)], rows[len(ROWS) :]
