"""Options of a text, from a command line or a request, and the checked request of a command line."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields, replace
from typing import Any, NamedTuple

from decoding.run.chooser import DraftOptions, Setting
from decoding.run.together import MOST_TOGETHER
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model import Decoder, InputError
from weights.cli.command_line import say
from weights.cli.device import pick_device
from weights.cli.files import check_place, explaining
from weights.cli.prompt import check_prompt, encode_prompt, read_prompt
from weights.load import DTYPES, model_folder, read_config, stored_dtype
from weights.memory import estimate, free_bytes
from weights.tokenizer import Tokenizer


class TextOptions(NamedTuple):
    """Options of drafting and sampling, the rules of the text, and its seed."""

    draft: DraftOptions
    params: SamplingParams
    rules: Rules
    coupling: Coupling

    @staticmethod
    def of(options: Namespace, eos_ids: frozenset[int] = frozenset()) -> TextOptions:
        """Those of options under the command line's names. Raises InputError for a value out of range."""
        draft = {field.name: getattr(options, field.name) for field in fields(DraftOptions)[1:]}
        params = {field.name: getattr(options, field.name) for field in fields(SamplingParams)}
        shared = options.num_samples > 1 or (options.serve and options.together > 1)  # texts that may share steps
        return TextOptions(
            DraftOptions(options.draft, **draft),
            SamplingParams(**params),
            Rules(options.max_new_tokens, eos_ids, options.stop, options.ban),
            Coupling.of(options.coupling or ("race" if shared else None), options.seed),
        )


class Request:
    """The request of ``generate.py``'s command line, checked before any weight is read.

    ``ids`` are the prompt's token ids, ``[0]`` where there is no prompt, as with --serve. Raises InputError.
    """

    def __init__(self, options: Namespace) -> None:
        with explaining("the text of --system, --stop or --ban is not UTF-8", (UnicodeEncodeError,)):
            "".join((options.system or "", *options.stop, *options.ban)).encode()
        self.draft, self.params, self.rules, self.coupling = TextOptions.of(options)
        if min(options.num_samples, options.together) < 1:
            raise InputError("--num-samples and --together must be at least 1")
        if options.html is not None:
            check_place(options.html)
        number = f" --num-samples {options.num_samples}" if options.num_samples > 1 else ""
        self.repeat_with = f"{self.coupling}{number}" if options.temperature else ""
        self.folder, self.device = model_folder(options.model), pick_device(options.device)
        self.config = read_config(self.folder)
        self.dtype = DTYPES.get(options.dtype) or stored_dtype(self.folder)
        self.options, self.prompt, self.ids = options, "", [0]
        if not (options.dry_run or options.serve) or options.prompt is not None or options.prompt_file is not None:
            self.tokenizer = Tokenizer(self.folder)
            self.rules = replace(self.rules, eos_ids=self.tokenizer.eos_ids)
            self.prompt = read_prompt(options.prompt, options.prompt_file)
            self.ids = encode_prompt(self.tokenizer, self.prompt, chat=options.chat, system=options.system)
            check_prompt(self.ids, self.config, self.folder)

    @property
    def capacity(self) -> int:
        """Positions of prompt and output; without a prompt the model's whole context."""
        wanted = len(self.ids) + self.rules.max_new_tokens if self.prompt else self.config.max_positions
        return min(wanted, self.config.max_positions)

    def needs(self) -> dict[str, Any]:
        """Arguments of ``weights.memory.estimate`` besides the config."""
        needs = {"dtype": self.dtype, "positions": self.capacity, "prompt": len(self.ids)}
        return needs | self.draft.needs(self.folder, self.config)

    def setting(self, model: Decoder) -> Setting:
        """The setting in which the prepared model drafts for this request."""
        texts = self.params, self.capacity, self.coupling.name, len(self.ids)
        return Setting(self.folder, model, self.tokenizer, *texts)

    def samples_together(self, model: Decoder) -> int:
        """The number of samples written at once: as many as fit into memory; 1 where times are to be compared."""
        if self.options.num_samples == 1 or self.options.compare:
            return 1
        if not hasattr(model, "together"):
            say("samples are written one after another: here a step takes one text")
            return 1
        memory = estimate(self.config, **self.needs(), fast_on=self.device)
        fitting = free_bytes(self.device) // (memory.cache + memory.workspace)
        return max(1, min(self.options.num_samples, MOST_TOGETHER, fitting))
