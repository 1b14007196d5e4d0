"""Texts by romsto/Speculative-Decoding, in the clone that ROMSTO names."""

from functools import partial

from tests.decoding.proof.foreign.bigrams import (
    DRAFT,
    PROMPT,
    TARGET,
    TOKENS,
    Bigrams,
    foreign,
)

generate = foreign("ROMSTO", "sampling.speculative_decoding").speculative_generate
processors = foreign("ROMSTO", "utils.logits_processor")


def write(**options: bool) -> tuple[int, ...]:
    """A text by ``speculative_generate``."""
    written, _ = generate(
        PROMPT,
        Bigrams(DRAFT),
        Bigrams(TARGET),
        gamma=2,
        logits_processor=processors.MultinomialProcessor(1.0),
        max_gen_len=TOKENS,
        eos_tokens_id=-1,
        **options,
    )
    return tuple(written)


speculative = write
without_adjustment = partial(write, skip_sample_adjustment=True)
