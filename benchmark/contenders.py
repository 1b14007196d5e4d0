"""Contenders: this project's loop with each way to draft, transformers on the same checkpoint,
llama.cpp on a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from app.chooser import Setting
from app.command_line import say
from app.draft_options import DraftOptions
from app.files import explaining
from app.writer import GAMMA, Drafting, Writer
from decoding.rounds import Round
from decoding.text import Rules
from decoding.verify import Coupling
from search.costs import CostTable, measure_costs
from weights.load import model_folder

# of prompts of which the first token is timed
LENGTHS = (64, 256, 1024, 2048, 4096, 8192)
LONGEST_VERIFICATION = 16  # tokens
ADAPTIVE = ", adaptive"  # ends the names of drafts with the adaptive exit
LIBRARIES = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # their packages


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
    "stories". ``drafts`` and ``libraries`` are those of ``find_drafts`` and ``library_contenders``,
    by the names in the tables. ``exit_layers``: the early exits asked for.
    """

    setting: Setting
    prompts: list[tuple[str, list[int]]]
    drafts: dict[str, Drafting]
    libraries: dict[str, Contender]
    max_new_tokens: int
    exit_layers: Sequence[int] = ()
    quick: bool = False

    @cached_property
    def costs(self) -> dict[str, CostTable]:
        """Cost tables, measured at their first use: of lookup, whose drafts cost nothing, and of
        each draft by one model. Rounds with the adaptive exit are taken to cost the same.
        """
        by_model = {
            name: draft
            for name, draft in self.drafts.items()
            if name not in ("lookup", "auto") and not name.endswith(ADAPTIVE)
        }
        prompts = [ids for _, ids in self.prompts]
        longest = LONGEST_VERIFICATION - 1
        tables = measure_costs(self.setting, prompts, list(by_model.values()), longest)
        return dict(zip(("lookup", *by_model), tables, strict=True))

    def costs_of(self, name: str) -> CostTable | None:
        """Cost table of a draft's rounds; None for a name of no draft, and for --draft auto."""
        return self.costs.get(name.removesuffix(ADAPTIVE)) if name in self.drafts else None


def decode(
    writer: Writer, setting: Setting, drafting: Drafting, prompt: list[int], count: int
) -> Written:
    """Text by this project's loop with one way to draft. The seed depends on the prompt only."""
    prefill = writer.begin(prompt)
    coupling = Coupling(setting.coupling, sum(prompt))
    sample = writer.write(writer.new_text(Rules(count)), drafting, setting.params, coupling)
    return Written(sample.tokens, sample.rounds, prefill)


def find_drafts(
    setting: Setting, exit_layers: Sequence[int] = (), draft_model: str | None = None
) -> dict[str, Drafting]:
    """Drafts, with their low-bit copies: lookup, early exits, by default a middle and a late one,
    all layers in low bits, the plan in the model's folder and the draft model, if any, and --draft
    auto; those by one model also with the adaptive exit.
    """
    layers = setting.model.num_layers
    exits = exit_layers or sorted({layers // 2, layers * 4 // 5} - {0})
    by_model = {f"exit {layer}": DraftOptions("exit", exit_layer=layer) for layer in exits}
    if setting.model.fast_bits:
        by_model["low bits"] = DraftOptions("lowbit")
    if (setting.folder / "plan.json").exists():
        by_model["plan.json"] = DraftOptions("skip")
    if draft_model:
        by_model["model"] = DraftOptions("model", draft_model=draft_model)
    asked = {"lookup": DraftOptions("lookup")}
    for name, options in by_model.items():
        asked[name] = options
        asked[name + ADAPTIVE] = replace(options, adaptive=True)
    asked["auto"] = DraftOptions("auto")
    found = {}
    for name, options in asked.items():
        found[name] = setting.drafting(options, setting.params)
        found[name].preparation.work()
    # A plan of which no draft pays has length 0.
    return {name: each for name, each in found.items() if each.new_policy().gamma}


def transformers_contenders(
    setting: Setting, exit_layers: Sequence[int], draft_model: str | None
) -> dict[str, Contender]:
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
    if exit_layers:
        deepest = max(exit_layers)
        found[f"transformers, exit {deepest}"] = partial(write, assistant_early_exit=deepest)
    if draft_model:
        draft = load(model_folder(draft_model))
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


def llama_cpp_contender(setting: Setting, file: str) -> Contender:
    """Contender: plain decoding of llama.cpp from a GGUF file."""
    theirs = load_llama_cpp(file, max(setting.positions, *LENGTHS), setting.model.device)

    def write(prompt: list[int], count: int) -> Written:
        theirs.reset()  # otherwise the same prompt again needs no prefill
        return Written(list(islice(theirs.generate(prompt, temp=0.0), count)))

    return write


def library_contenders(
    setting: Setting,
    against: Mapping[str, str],
    exit_layers: Sequence[int] = (),
    draft_model: str | None = None,
) -> dict[str, Contender]:
    """Contenders of the libraries ``against``, each with its file, or "". Under the name of the
    library it decodes plainly. Raises InputError for one that cannot load the model, or is missing.
    """
    found: dict[str, Contender] = {}
    for library, file in against.items():
        needs = (
            f"--against {library} needs pip install {LIBRARIES[library]}; llama.cpp also needs"
            " =FILE.gguf"
        )
        with explaining(needs, (Exception,)):  # a library may raise anything
            if library == "llama.cpp":
                found[library] = llama_cpp_contender(setting, file)
            else:
                found |= transformers_contenders(setting, exit_layers, draft_model)
    return found
