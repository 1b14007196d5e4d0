"""Other libraries on the same checkpoint: transformers with each of its drafts, llama.cpp on a file.

Their texts are greedy, of a given length, and ignore end-of-text tokens, as ours.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from app.command_line import say
from app.files import explaining
from app.plan_file import GAMMA
from app.session import Session
from benchmark.ways import Case, Way, Written
from weights.load import model_folder

PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}


def transformers_ways(
    session: Session, exit_layers: Sequence[int], draft_model: str | None
) -> dict[str, Way]:
    """Return ``generate`` of transformers in the session's dtype, plainly and with each draft, of
    ``GAMMA`` tokens.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=session.dtype)
        loaded.generation_config.update(
            eos_token_id=None,
            assistant_confidence_threshold=0.0,
            num_assistant_tokens=GAMMA,
            num_assistant_tokens_schedule="constant",
        )
        return loaded.to(session.device)

    model = load(session.folder)

    def write(case: Case, **draft: Any) -> Written:
        ids = torch.tensor([case.ids], device=session.device)
        mask = torch.ones_like(ids)
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=case.count, do_sample=False, **draft
        )
        return Written(written[0, len(case.ids) :].tolist())

    drafts: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers, lookup": {"prompt_lookup_num_tokens": GAMMA},
    }
    if exit_layers:
        deepest = max(exit_layers)
        drafts[f"transformers, exit {deepest}"] = {"assistant_early_exit": deepest}
    if draft_model:
        drafts["transformers, model"] = {"assistant_model": load(model_folder(draft_model))}
    return {name: partial(write, **draft) for name, draft in drafts.items()}


def llama_cpp_way(session: Session, file: str, positions: int) -> Way:
    """Return plain decoding of llama.cpp from a GGUF file, with torch's number of threads."""
    import llama_cpp

    threads = torch.get_num_threads()
    say(f"llama.cpp: {llama_cpp.llama_print_system_info().decode().strip(' |')}")
    theirs = llama_cpp.Llama(
        file,
        n_ctx=positions,
        n_gpu_layers=0 if session.device.type == "cpu" else -1,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def write(case: Case) -> Written:
        theirs.reset()  # otherwise the same prompt again needs no reading
        return Written(list(islice(theirs.generate(case.ids, temp=0.0), case.count)))

    return write


def library_ways(
    session: Session,
    against: Mapping[str, str],
    positions: int,
    exit_layers: Sequence[int] = (),
    draft_model: str | None = None,
) -> dict[str, Way]:
    """Return the ways of the libraries ``against``, each with its file, or "". Under the name of the
    library it decodes plainly. Raises InputError for one that cannot load the model, or is missing.
    """
    found: dict[str, Way] = {}
    for library, file in against.items():
        needs = (
            f"--against {library} needs pip install {PACKAGES[library]}; llama.cpp also needs"
            " =FILE.gguf"
        )
        with explaining(needs, (Exception,)):  # a library may raise anything
            if library == "llama.cpp":
                found[library] = llama_cpp_way(session, file, positions)
            else:
                found |= transformers_ways(session, exit_layers, draft_model)
    return found
