"""Contenders: this project's loop with each way to draft, transformers on the same checkpoint,
llama.cpp on a file.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cli.command_line import say
from cli.files import explaining
from decoding.rounds import Round
from decoding.run.chooser import DraftOptions, Setting, with_policy
from decoding.run.writer import GAMMA, Drafting, Writer, plain
from decoding.text import Rules
from decoding.verify import Coupling
from search.costs import CostTable, measure_costs
from weights.load import model_folder

# suffix of the name of a draft that stops by Draft & Verify's adaptive exit
ADAPTIVE = ", adaptive"
# A drafting that is made takes only its policy from options: they hold for every kind of draft.
ADAPTIVE_POLICY = DraftOptions("exit", adaptive=True)
LONGEST_VERIFICATION = 16  # tokens
WARM_UP_TOKENS = 8
PACKAGES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # by library


@dataclass
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

    ``prompts``: kind and token ids of each; the kind is a key of ``search.prompts.PROMPTS``, or
    "stories". ``lengths``: tokens of the prompts after which the first token is timed.
    """

    options: argparse.Namespace
    setting: Setting
    prompts: list[tuple[str, list[int]]]
    lengths: list[int]
    drafts: dict[str, Drafting] = field(default_factory=dict)
    libraries: dict[str, Contender] = field(default_factory=dict)

    def drafting(self, options: DraftOptions) -> Drafting:
        """The drafting that the options ask for, with its low-bit copies."""
        drafting = self.setting.drafting(options, self.setting.params)
        drafting.preparation.finish()
        return drafting

    @cached_property
    def costs(self) -> dict[str, CostTable]:
        """Cost table of each draft, measured at its first use."""
        drafts = list(self.drafts.values())
        longest = max([LONGEST_VERIFICATION - 1, *(draft.new_policy().gamma for draft in drafts)])
        prompts = [ids for _, ids in self.prompts]
        tables = measure_costs(self.setting, prompts, drafts, longest)
        return dict(zip(self.drafts, tables, strict=True))


def contender(writer: Writer, drafting: Drafting, setting: Setting) -> Contender:
    """Contender: the loop with one way to draft, prefill included. The seed depends on the prompt
    only.
    """

    def write(prompt: list[int], count: int) -> Written:
        prefill = writer.begin(prompt)
        coupling = Coupling(setting.coupling, sum(prompt))
        sample = writer.write(writer.new_text(Rules(count)), drafting, setting.params, coupling)
        return Written(sample.tokens, sample.rounds, prefill)

    return write


def our_contenders(bench: Bench) -> dict[str, Contender]:
    """Contenders: plain decoding, each draft, each draft by a model with adaptive exit too, --draft
    auto.
    """
    setting = bench.setting
    ways = {"plain": plain(setting.model)}
    for name, drafting in bench.drafts.items():
        ways[name] = drafting
        if drafting.model:
            ways[name + ADAPTIVE] = with_policy(drafting, ADAPTIVE_POLICY, setting.params)
    ways["auto"] = bench.drafting(DraftOptions("auto"))
    writer = Writer(setting.model, setting.positions)
    return {name: contender(writer, way, setting) for name, way in ways.items()}


def find_drafts(bench: Bench) -> dict[str, Drafting]:
    """Drafts: lookup, early exits, all layers in low bits, the plan in the model's folder, the
    draft model, if any.
    """
    setting = bench.setting
    options = bench.options
    layers = setting.model.num_layers
    ways = {"lookup": DraftOptions("lookup")}
    for layer in options.exit_layer or sorted({layers // 2, layers * 4 // 5} - {0}):
        ways[f"exit {layer}"] = DraftOptions("exit", exit_layer=layer, gamma=GAMMA)
    if setting.model.fast_bits:
        ways["low bits"] = DraftOptions("lowbit")
    if (setting.folder / "plan.json").exists():
        ways["plan.json"] = DraftOptions("skip")
    if options.draft_model:
        ways["model"] = DraftOptions("model", draft_model=options.draft_model)
    found = {name: bench.drafting(way) for name, way in ways.items()}
    return {name: way for name, way in found.items() if way.new_policy().gamma}  # 0: no draft pays


def transformers_contenders(bench: Bench) -> dict[str, Contender]:
    """Contenders: ``generate`` of transformers on the same checkpoint, dtype and device, with each
    way to draft.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = bench.setting.model

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

    theirs = load(bench.setting.folder)

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
    if bench.options.exit_layer:
        deepest = max(bench.options.exit_layer)
        found[f"transformers, exit {deepest}"] = partial(write, assistant_early_exit=deepest)
    if bench.options.draft_model:
        draft = load(model_folder(bench.options.draft_model))
        found["transformers, model"] = partial(write, assistant_model=draft)
    return found


def llama_cpp_contenders(bench: Bench) -> dict[str, Contender]:
    """Contender: plain decoding of llama.cpp from a GGUF file, with torch's number of threads."""
    import llama_cpp

    threads = torch.get_num_threads()
    theirs = llama_cpp.Llama(
        bench.options.against["llama.cpp"],
        n_ctx=max(bench.setting.positions, *bench.lengths),
        n_gpu_layers=0 if bench.setting.model.device.type == "cpu" else -1,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    say(f"llama.cpp: {llama_cpp.llama_print_system_info().decode().strip(' |')}")

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # otherwise the same prompt again needs no prefill
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return {"llama.cpp": write}


LIBRARIES = {"transformers": transformers_contenders, "llama.cpp": llama_cpp_contenders}


def library_contenders(bench: Bench) -> dict[str, Contender]:
    """Contenders of the libraries of --against. Raises InputError for one that cannot load the
    model, or is missing.
    """
    found: dict[str, Contender] = {}
    for library in bench.options.against:
        needs = (
            f"--against {library} needs pip install {PACKAGES[library]}, and llama.cpp=FILE.gguf"
            " the model's file"
        )
        with explaining(needs, (Exception,)):  # a library may raise anything
            found |= LIBRARIES[library](bench)
    return found
