"""Contenders of other libraries: transformers on the same checkpoint, llama.cpp on a GGUF file of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmark.contenders import WARM_UP_TOKENS, Bench, Contender, Written, exit_layer
from decoding.run.chooser import GAMMA
from model import Decoder, InputError
from weights.cli.files import one_line
from weights.names import model_folder

LIBRARIES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}  # --against -> the module it needs
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}

Result = TypeVar("Result")


def transformers_contenders(
    folder: Path, model: Decoder, draft_folder: Path | None, exit_at: int
) -> dict[str, Contender]:
    """``generate`` of transformers on the same checkpoint, dtype and device, by each of its ways to draft."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
        loaded.generation_config.eos_token_id = None  # end-of-text is ignored, as in our contenders
        # As many tokens as ours, always: not more after a success, nor fewer after an unsure token.
        loaded.generation_config.num_assistant_tokens = GAMMA
        loaded.generation_config.num_assistant_tokens_schedule = "constant"
        loaded.generation_config.assistant_confidence_threshold = 0.0
        return loaded

    theirs = load(folder)

    def contender(**options: object) -> Contender:
        def write(prompt: list[int], count: int) -> Written:
            ids = torch.tensor([prompt], device=model.device)
            seen = torch.ones_like(ids)
            written = theirs.generate(ids, attention_mask=seen, max_new_tokens=count, do_sample=False, **options)
            return Written(written[0, len(prompt) :].tolist())

        return Contender(write)

    found = {
        "transformers": contender(),
        "transformers, lookup": contender(prompt_lookup_num_tokens=GAMMA),
        f"transformers, exit {exit_at}": contender(assistant_early_exit=exit_at),
    }
    if draft_folder is not None:
        found["transformers, model"] = contender(assistant_model=load(draft_folder))
    return found


def llama_cpp_contender(file: str, device: torch.device, longest: int) -> Contender:
    """Plain decoding of llama.cpp from a GGUF file, for texts up to ``longest`` tokens, with torch's number of threads.

    Raises InputError where it was built without support for the device.
    """
    import llama_cpp

    if device.type != "cpu" and not llama_cpp.llama_supports_gpu_offload():
        raise InputError(f"this llama-cpp-python was built without support for {device.type}")
    threads = torch.get_num_threads()
    theirs = llama_cpp.Llama(
        file,
        n_ctx=longest,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0 if device.type == "cpu" else -1,
        verbose=False,
    )

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # or a prompt that it has just read would cost nothing
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return Contender(write)


def llama_cpp_features() -> str:
    """What llama.cpp was built with, such as the processor's instructions that it uses."""
    import llama_cpp

    return llama_cpp.llama_print_system_info().decode().strip(" |")


def other_contenders(bench: Bench) -> dict[str, Contender]:
    """The libraries of --against, less what they cannot do with this model: that goes into the notes."""
    deepest = exit_layer(bench.model.num_layers, bench.options.exit_layer)
    draft_folder = model_folder(bench.options.draft_model) if bench.options.draft_model else None
    longest = max([bench.setting.positions, *bench.prompt_lengths])
    against = bench.options.against
    makers: dict[str, Callable[[], dict[str, Contender]]] = {
        "transformers": lambda: transformers_contenders(bench.folder, bench.model, draft_folder, deepest),
        "llama.cpp": lambda: {"llama.cpp": llama_cpp_contender(against["llama.cpp"], bench.model.device, longest)},
    }
    found: dict[str, Contender] = {}
    for library in against:
        for name, contender in (attempt(bench, library, makers[library]) or {}).items():
            if attempt(bench, name, partial(contender.write, bench.prompts[0][2], WARM_UP_TOKENS)):
                found[name] = contender
    return found


def attempt(bench: Bench, name: str, work: Callable[[], Result]) -> Result | None:
    """What ``work`` returns; None, and a note, where it fails: on a model that it does not know, a library may."""
    try:
        return work()
    except Exception as error:
        bench.notes.append(f"{name}: not possible with this model: {one_line(error)}")
        return None
