"""Contenders of other libraries, on the same weights in the same dtype."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from model import Decoder, InputError
from search.benchmark.contenders import GAMMA, WARM_UP_TOKENS, Bench, Contender, Written, exit_layer
from weights.files import one_line

LIBRARIES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}  # --against -> the module it needs
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}


def transformers_contenders(folder: Path, model: Decoder, draft_folder: Path | None) -> dict[str, Contender]:
    """``generate`` of transformers on the same checkpoint, dtype and device, by each of its ways to draft."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
        loaded.generation_config.eos_token_id = None  # end-of-text is ignored, as in our contenders
        loaded.generation_config.num_assistant_tokens = GAMMA
        return loaded

    theirs = load(folder)

    def contender(**options: object) -> Contender:
        def write(prompt: list[int], count: int) -> Written:
            ids = torch.tensor([prompt], device=model.device)
            seen = torch.ones_like(ids)
            written = theirs.generate(ids, attention_mask=seen, max_new_tokens=count, do_sample=False, **options)
            return Written(written[0, len(prompt) :].tolist())

        return Contender(write)

    exit_at = exit_layer(model.num_layers)
    found = {
        "transformers": contender(),
        "transformers, lookup": contender(prompt_lookup_num_tokens=GAMMA),
        f"transformers, exit {exit_at}": contender(assistant_early_exit=exit_at),
    }
    if draft_folder is not None:
        found["transformers, model"] = contender(assistant_model=load(draft_folder))
    return found


def llama_cpp_contender(folder: Path, model: Decoder, longest: int) -> Contender:
    """Plain decoding of llama.cpp with the same weights in the same dtype, for texts up to ``longest`` tokens."""
    from weights.gguf_export import open_in_llama_cpp

    theirs = open_in_llama_cpp(folder, model.dtype, model.device, longest)

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # or a prompt that it has just read would cost nothing
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return Contender(write)


def other_contenders(bench: Bench) -> dict[str, Contender]:
    """The libraries of --against, less what they cannot do with this model: that goes into the notes."""
    found: dict[str, Contender] = {}
    if "transformers" in bench.options.against:
        found |= transformers_contenders(bench.folder, bench.model, bench.draft_folder)
    if "llama.cpp" in bench.options.against:
        try:
            found["llama.cpp"] = llama_cpp_contender(bench.folder, bench.model, bench.longest_text)
        except InputError as error:
            bench.notes.append(f"llama.cpp: not possible with this model: {one_line(error)}")
    for name, contender in list(found.items()):
        try:
            contender.write(bench.prompts[0][2], WARM_UP_TOKENS)
        except Exception as error:  # a library may fail in any way on a model that it does not know well
            bench.notes.append(f"{name}: not possible with this model: {one_line(error)}")
            del found[name]
    return found
