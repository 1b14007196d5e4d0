"""Options that a text depends on, from a command line or a request."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import NamedTuple

from decoding.run.chooser import DraftOptions
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling


class TextOptions(NamedTuple):
    """How to draft and to sample, the rules of the text, and its seed."""

    draft: DraftOptions
    params: SamplingParams
    rules: Rules
    coupling: Coupling

    @staticmethod
    def of(options: Namespace, eos_ids: frozenset[int] = frozenset()) -> TextOptions:
        """Those of options under the command line's names. Raises InputError for a value that is not possible."""
        draft = {field.name: getattr(options, field.name) for field in fields(DraftOptions)[1:]}
        params = {field.name: getattr(options, field.name) for field in fields(SamplingParams)}
        race = "race" if options.num_samples > 1 else None  # texts that may share steps
        return TextOptions(
            DraftOptions(options.draft, **draft),
            SamplingParams(**params),
            Rules(options.max_new_tokens, eos_ids, options.stop, options.ban),
            Coupling.of(options.coupling or race, options.seed),
        )
