"""Contenders of other libraries: transformers on the same checkpoint, llama.cpp on a GGUF file of the model."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmark.contenders import Bench, Contender, Written
from decoding.run.chooser import GAMMA
from weights.cli.command_line import say
from weights.cli.files import explaining, one_line
from weights.load import model_folder

WARM_UP_TOKENS = 8
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}


def transformers_contenders(bench: Bench) -> dict[str, Contender]:
    """Contenders: ``generate`` of transformers on the same checkpoint, dtype and device, with each way to draft."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, options = bench.setting.model, bench.options

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device)
        # As in this project's contenders, end-of-text is ignored and every draft has GAMMA tokens.
        lengths = {"num_assistant_tokens": GAMMA, "num_assistant_tokens_schedule": "constant"}
        loaded.generation_config.update(eos_token_id=None, assistant_confidence_threshold=0.0, **lengths)
        return loaded

    theirs = load(bench.setting.folder)

    def write(prompt: list[int], count: int, **draft: object) -> Written:
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        written = theirs.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **draft)
        return Written(written[0, len(prompt) :].tolist())

    found = {"transformers": write, "transformers, lookup": partial(write, prompt_lookup_num_tokens=GAMMA)}
    if options.exit_layer:
        deepest = max(options.exit_layer)
        found[f"transformers, exit {deepest}"] = partial(write, assistant_early_exit=deepest)
    if options.draft_model:
        found["transformers, model"] = partial(write, assistant_model=load(model_folder(options.draft_model)))
    return found


def llama_cpp_contenders(bench: Bench) -> dict[str, Contender]:
    """Contender: plain decoding of llama.cpp from a GGUF file, with torch's number of threads."""
    import llama_cpp

    threads = torch.get_num_threads()
    size = {"n_ctx": max(bench.setting.positions, *bench.lengths)}
    size["n_gpu_layers"] = 0 if bench.setting.model.device.type == "cpu" else -1
    speed = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    theirs = llama_cpp.Llama(bench.options.against["llama.cpp"], **size, **speed)
    say(f"llama.cpp: {llama_cpp.llama_print_system_info().decode().strip(' |')}")

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # otherwise the same prompt again needs no prefill
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return {"llama.cpp": write}


LIBRARIES = {"transformers": transformers_contenders, "llama.cpp": llama_cpp_contenders}


def library_contenders(bench: Bench) -> dict[str, Contender]:
    """Contenders of the libraries of --against, without ways to draft that fail with this model.

    Raises InputError for a library that is not installed or cannot load the model.
    """
    found: dict[str, Contender] = {}
    for library in bench.options.against:
        file = ", and llama.cpp=FILE.gguf, a file of the model" if library == "llama.cpp" else ""
        needs = f"--against {library} needs pip install {PACKAGES[library]}{file}"
        with explaining(needs, (Exception,)):  # a library may raise anything
            ways = LIBRARIES[library](bench)
        for name, write in ways.items():
            try:
                write(bench.prompts[0].ids, WARM_UP_TOKENS)
                found[name] = write
            except Exception as error:
                say(f"{name}: not possible with this model: {one_line(error)}")
    return found
