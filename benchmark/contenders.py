"""Contenders: this project's loop with each way to draft, transformers on the same checkpoint,
llama.cpp on a file.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cli.command_line import say
from cli.files import explaining
from decoding.rounds import Round
from decoding.run.chooser import Setting
from decoding.run.draft_options import DraftOptions
from decoding.run.writer import GAMMA, Drafting, Writer
from decoding.text import Rules
from decoding.verify import Coupling
from search.costs import CostTable, measure_costs
from weights.load import model_folder

ADAPTIVE = ", adaptive"  # suffix of a draft's name: under Draft & Verify's adaptive exit
LENGTHS = (64, 256, 1024, 2048, 4096, 8192)  # of prompts of which the first token is timed
LONGEST_VERIFICATION = 16  # tokens
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # by library


@dataclass(frozen=True)
class Written:
    """Tokens of a text; for texts of this project's loop also the rounds, and the seconds of
    prefill.
    """

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)
    prefill: float = 0.0
    seconds: float = 0.0  # of the whole, once it was timed


# writes a text of n tokens after a prompt; end-of-text is ignored
Contender = Callable[[list[int], int], Written]


@dataclass
class Bench:
    """Input of every section.

    ``prompts``: kind and token ids of each; the kind is a key of ``search.texts.PROMPTS``, or
    "stories". ``drafts`` and ``libraries`` are those of ``find_drafts`` and ``library_contenders``.
    """

    options: argparse.Namespace
    setting: Setting
    prompts: list[tuple[str, list[int]]]
    drafts: dict[str, Drafting]
    libraries: dict[str, Contender]

    @cached_property
    def costs(self) -> dict[str, CostTable]:
        """Cost table of lookup and of each draft that one model makes, measured at its first
        use.
        """
        drafts = {name: way for name, way in self.drafts.items() if name + ADAPTIVE in self.drafts}
        prompts = [ids for _, ids in self.prompts]
        longest = LONGEST_VERIFICATION - 1
        tables = measure_costs(self.setting, prompts, list(drafts.values()), longest)
        return dict(zip(("lookup", *drafts), tables, strict=True))


def decode(
    writer: Writer, setting: Setting, drafting: Drafting, prompt: list[int], count: int
) -> Written:
    """Text by this project's loop with one way to draft. The seed depends on the prompt only."""
    prefill = writer.begin(prompt)
    coupling = Coupling(setting.coupling, sum(prompt))
    sample = writer.write(writer.new_text(Rules(count)), drafting, setting.params, coupling)
    return Written(sample.tokens, sample.rounds, prefill)


def find_drafts(options: argparse.Namespace, setting: Setting) -> dict[str, Drafting]:
    """Drafts, with their low-bit copies: lookup, early exits, all layers in low bits, the plan in
    the model's folder and the draft model, if any, and --draft auto; those by one model also with
    the adaptive exit.
    """
    layers = setting.model.num_layers
    exits = options.exit_layer or sorted({layers // 2, layers * 4 // 5} - {0})
    by_model = {f"exit {layer}": DraftOptions("exit", exit_layer=layer) for layer in exits}
    if setting.model.fast_bits:
        by_model["low bits"] = DraftOptions("lowbit")
    if (setting.folder / "plan.json").exists():
        by_model["plan.json"] = DraftOptions("skip")
    if options.draft_model:
        by_model["model"] = DraftOptions("model", draft_model=options.draft_model)
    ways = {"lookup": DraftOptions("lookup")}
    for name, way in by_model.items():
        ways |= {name: way, name + ADAPTIVE: replace(way, adaptive=True)}
    ways["auto"] = DraftOptions("auto")
    found = {name: setting.drafting(way, setting.params) for name, way in ways.items()}
    for drafting in found.values():
        drafting.preparation.work()
    return {name: way for name, way in found.items() if way.new_policy().gamma}  # 0: no draft pays


def transformers_contenders(options: argparse.Namespace, setting: Setting) -> dict[str, Contender]:
    """Contenders: ``generate`` of transformers on the same checkpoint, dtype and device, with each
    way to draft.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = setting.model

    def load(folder: Path) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        # As in this project's contenders, end-of-text is ignored and every draft has GAMMA tokens.
        loaded.generation_config.update(
            eos_token_id=None,
            assistant_confidence_threshold=0.0,
            num_assistant_tokens=GAMMA,
            num_assistant_tokens_schedule="constant",
        )
        return loaded.to(model.device)

    theirs = load(setting.folder)

    def write(prompt: list[int], count: int, **draft: object) -> Written:
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        written = theirs.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **draft
        )
        return Written(written[0, len(prompt) :].tolist())

    found = {
        "transformers": write,
        "transformers, lookup": partial(write, prompt_lookup_num_tokens=GAMMA),
    }
    if options.exit_layer:
        deepest = max(options.exit_layer)
        found[f"transformers, exit {deepest}"] = partial(write, assistant_early_exit=deepest)
    if options.draft_model:
        draft = load(model_folder(options.draft_model))
        found["transformers, model"] = partial(write, assistant_model=draft)
    return found


def load_llama_cpp(file: str, positions: int, device: torch.device) -> Any:
    """llama.cpp with the model of a GGUF file, with torch's number of threads."""
    import llama_cpp

    threads = torch.get_num_threads()
    say(f"llama.cpp: {llama_cpp.llama_print_system_info().decode().strip(' |')}")
    return llama_cpp.Llama(
        file,
        n_ctx=positions,
        n_gpu_layers=0 if device.type == "cpu" else -1,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )


def llama_cpp_contenders(options: argparse.Namespace, setting: Setting) -> dict[str, Contender]:
    """Contender: plain decoding of llama.cpp from a GGUF file."""
    file = options.against["llama.cpp"]
    theirs = load_llama_cpp(file, max(setting.positions, *LENGTHS), setting.model.device)

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # otherwise the same prompt again needs no prefill
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return {"llama.cpp": write}


LIBRARIES = {"transformers": transformers_contenders, "llama.cpp": llama_cpp_contenders}


def library_contenders(options: argparse.Namespace, setting: Setting) -> dict[str, Contender]:
    """Contenders of the libraries of --against. Raises InputError for one that cannot load the
    model, or is missing.
    """
    found: dict[str, Contender] = {}
    for library in options.against:
        needs = (
            f"--against {library} needs pip install {PACKAGES[library]}; llama.cpp also needs"
            " =FILE.gguf"
        )
        with explaining(needs, (Exception,)):  # a library may raise anything
            found |= LIBRARIES[library](options, setting)
    return found
