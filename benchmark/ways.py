"""Ways to write a text: this project's session with each kind of draft, and other libraries.

Texts have a given length and ignore end-of-text tokens, but those under a JSON schema. Knows
nothing of clocks and tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from app.loaded import CONTEXT
from app.options import Options
from app.plan_file import GAMMA
from app.sample import Sample, Slot
from app.session import Session
from decoding.rounds import Round
from weights.load import model_folder


@dataclass(frozen=True)
class Case:
    """Prompt, after which ``count`` tokens are written, or a text of a JSON ``schema``. ``number``
    selects the text's random numbers. Cases of one ``kind``, if they have any, share a column of
    speed-ups. ``reads_prompt``: whether each way reads the prompt anew, in its time.
    """

    ids: Sequence[int]
    count: int
    number: int = 0
    kind: str = ""
    schema: str | None = None
    reads_prompt: bool = True


@dataclass(frozen=True)
class Written:
    """Tokens of a text, or of several, and for this project's texts their rounds. ``seconds`` are
    those of decoding alone, where the reading of the prompt is not to be counted; else None:
    the whole time counts.
    """

    texts: list[list[int]]
    rounds: list[Round] = field(default_factory=list)
    seconds: float | None = None


Way = Callable[[Case], Written]

# names of ways that a section may ask for
PLAIN = "plain"
LOOKUP = "lookup"
LOW_BITS = "low bits"
DRAFT_MODEL = "model"
AUTO = "auto"


def find_drafts(
    session: Session, exit_layers: Sequence[int], draft_model: str | None
) -> dict[str, Options]:
    """Return the options of each draft: lookup, early exits, low bits where they are fast, the plan
    in the model's folder if it pays, the draft model if there is one, and auto. Those by a model
    also have the adaptive exit.
    """
    by_model = {f"exit {layer}": {"draft": "exit", "exit_layer": layer} for layer in exit_layers}
    if session.model.abilities.low_bits:
        by_model[LOW_BITS] = {"draft": "lowbit"}
    plan = session.plan_for(Options(draft="auto"))  # read once, not for each text
    if plan and plan.gamma != 0:
        by_model["plan.json"] = {"draft": "skip", "plan": plan}
    if draft_model:
        by_model[DRAFT_MODEL] = {"draft": "model", "draft_model": draft_model}
    drafts = {LOOKUP: {"draft": "lookup"}}
    for name, given in by_model.items():
        drafts |= {name: given, f"{name}, adaptive": given | {"adaptive": True}}
    drafts[AUTO] = {"draft": "auto", "plan": plan}
    return {name: session.options.merged(given) for name, given in drafts.items()}


def begin(session: Session, options: Options, case: Case) -> Sample:
    """Return a text that holds the prompt of its case only."""
    given = {"max_new_tokens": case.count, "json_schema": case.schema}
    sample = session.begin(case.ids, options.merged(given), case.number)
    if case.schema is None:  # no token ends the text, so that all ways write equally many
        sample.source.conditions = replace(sample.source.conditions, eos_ids=frozenset())
    return sample


def write(session: Session, slot: Slot, options: Options, case: Case) -> Written:
    """Return the text of a case, on the cache of all cases."""
    sample = begin(session, options, case)
    if case.reads_prompt:
        slot.tokens = []  # forget the case before, so that the prompt is read anew
    for _ in session.rounds(sample, slot):
        pass
    return Written([sample.tokens], sample.rounds, None if case.reads_prompt else sample.seconds)


def transformers_ways(
    session: Session, exit_layers: Sequence[int], draft_model: str | None
) -> tuple[Way, dict[str, Way]]:
    """Return greedy ``generate`` of transformers on the session's checkpoint: plainly, and with
    each of its drafts of ``GAMMA`` tokens, by lookup, by the last of the early exits and by the
    draft model.
    """
    import transformers

    transformers.logging.set_verbosity_error()

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=session.dtype)
        loaded.generation_config.update(
            eos_token_id=None,
            assistant_confidence_threshold=0.0,
            num_assistant_tokens=GAMMA,
            num_assistant_tokens_schedule="constant",
        )
        return loaded.to(session.device)

    theirs = load(session.folder)

    def generate(case: Case, **draft: Any) -> Written:
        ids = torch.tensor([case.ids], device=session.device)
        written = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=case.count,
            **draft,
        )
        return Written(written[:, len(case.ids) :].tolist())

    drafts: dict[str, dict[str, Any]] = {
        "transformers, lookup": {"prompt_lookup_num_tokens": GAMMA},
        f"transformers, exit {exit_layers[-1]}": {"assistant_early_exit": exit_layers[-1]},
    }
    if draft_model:
        drafts["transformers, model"] = {"assistant_model": load(model_folder(draft_model))}
    return generate, {name: partial(generate, **draft) for name, draft in drafts.items()}


def llama_cpp_way(session: Session, file: str) -> Way:
    """Return greedy plain decoding of llama.cpp from a GGUF file, on as many threads as torch. It
    has no drafts.
    """
    import llama_cpp

    theirs = llama_cpp.Llama(
        file,
        n_ctx=min(CONTEXT, session.context),
        n_gpu_layers=0 if session.device.type == "cpu" else -1,
        n_threads=torch.get_num_threads(),
        n_threads_batch=torch.get_num_threads(),
        verbose=False,
    )

    def generate(case: Case) -> Written:
        theirs.reset()  # otherwise the same prompt again needs no reading
        return Written([[*islice(theirs.generate(case.ids, temp=0.0), case.count)]])

    return generate
