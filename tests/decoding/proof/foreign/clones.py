"""Texts by speculative code of others, unchanged: of each library whose clone an environment
variable names. Tables stand for its models.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.decoding.proof.foreign.bigrams import DRAFT, PROMPT, TARGET, TEMPERATURE, TOKENS

END = len(PROMPT) + TOKENS  # of a text; rounds may write more


def take_out(tops: set[str]) -> dict[str, ModuleType]:
    """The imported modules and packages of these names, which are forgotten."""
    names = [name for name in sys.modules if name.split(".")[0] in tops]
    return {name: sys.modules.pop(name) for name in names}


def foreign(variable: str, module: str, under: str = "") -> ModuleType:
    """Module of the clone, or in a folder ``under`` it. Its modules do not replace others of the
    same names.
    """
    folder = Path(os.environ[variable], under)
    tops = {path.stem for path in folder.iterdir()}
    ours = take_out(tops)
    try:
        with patch.object(sys, "path", [str(folder), *sys.path]):
            return importlib.import_module(module)
    finally:
        take_out(tops)
        sys.modules.update(ours)


class Bigrams:
    """Model as ``transformers`` has them: logits by the last token, and a cache of lengths only."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=4, max_position_embeddings=64)

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, input_ids: Tensor, past_key_values: Any = None, **unused: Any) -> Any:
        length = input_ids.shape[1] + (past_key_values[0][0].shape[2] if past_key_values else 0)
        entries = torch.zeros(1, 1, length, 1)
        return CausalLMOutputWithPast(
            logits=self.table.log()[input_ids], past_key_values=[(entries, entries)]
        )

    def set_draft_mode(self, drafts: bool) -> None:
        self.table = DRAFT if drafts else TARGET

    @contextmanager
    def self_draft(self) -> Iterator[None]:
        """Within, the table of the draft."""
        self.set_draft_mode(True)
        yield
        self.set_draft_mode(False)


# Two read this function of older versions, which filters nothing here. They come first, since other
# imports replace the module.
transformers.top_k_top_p_filtering = lambda logits, **_: logits

if "DRAFT_AND_VERIFY" in os.environ:
    decoding = foreign("DRAFT_AND_VERIFY", "decoding")

    def greedy_draft(**options: bool) -> tuple[int, ...]:
        """A text by ``self_speculative_sample``, in rounds of up to two drafted tokens, which the
        draft's confidence does not end.
        """
        found = decoding.self_speculative_sample(
            Bigrams(TARGET),
            None,
            torch.tensor([PROMPT]),
            max_new_tokens=TOKENS,
            max_step_draft=2,
            th_stop_draft=0.0,
            auto_th_stop_draft=False,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            **options,
        )
        return tuple(found["generate_ids"][0, :TOKENS].tolist())

    draft_and_verify = partial(greedy_draft, do_sample_draft=True)


if "LAYERSKIP" in os.environ:
    generator = foreign("LAYERSKIP", "self_speculation.self_speculation_generator")

    def answering(table: Tensor) -> Callable[..., Any]:
        """A function that gives this table's logits in place of those of some layers."""
        return lambda model, tokens, *_: SimpleNamespace(
            logits=table.log()[tokens.long()], past_key_values=(), exit_query_cache=None
        )

    generator.forward_early = answering(DRAFT)
    generator.forward_remainder = answering(TARGET)

    def layerskip() -> tuple[int, ...]:
        """A text by ``generate_token_ids``, with two drafted tokens per round."""
        settings = generator.GenerationConfig(
            max_steps=TOKENS, exit_layer=1, num_speculations=2, temperature=1.0, top_k=0, top_p=1.0
        )
        strategy = generator.SelfSpeculativeGenerationStrategy()
        written = strategy.generate_token_ids(Bigrams(TARGET), PROMPT, [-1], settings)
        return tuple(written.predicted_tokens)


if "GPT_FAST" in os.environ:
    generate = foreign("GPT_FAST", "generate")
    generate.create_block_mask = MagicMock()  # which no table reads

    def sample_one(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Token and probabilities without a batch, as ``speculative_decode`` reads them. At the
        commit judged, the clone's own function gives them with one, and the two do not fit
        together.
        """
        probs = generate.logits_to_probs(logits[0, -1], **options)
        return generate.multinomial_sample_one_no_sync(probs), probs

    generate.sample = sample_one

    def gpt_fast() -> tuple[int, ...]:
        """A text in rounds of two drafted tokens."""
        draft, target = (
            # called with tokens and positions, and before them a mask or none
            MagicMock(
                side_effect=lambda *given, table=table: table.log()[
                    given[-2].reshape(1, -1).long()
                ],
                max_seq_length=64,
            )
            for table in (DRAFT, TARGET)
        )
        text = torch.tensor(PROMPT)
        while len(text) < END:
            round = generate.speculative_decode(target, draft, text[-1], len(text) - 1, 2)
            text = torch.cat((text, round.long()))
        return tuple(text[len(PROMPT) : END].tolist())


if "LLM_SPECULATIVE_SAMPLING" in os.environ:
    rules = foreign("LLM_SPECULATIVE_SAMPLING", "sampling.speculative_sampling")

    def by_rule(rule: Callable[..., Tensor], **options: int) -> tuple[int, ...]:
        """A text by this function of LLMSpeculativeSampling."""
        models = Bigrams(DRAFT), Bigrams(TARGET)
        written = rule(torch.tensor([PROMPT]), *models, TOKENS, gamma=2, **options)
        return tuple(written[0, len(PROMPT) : END].tolist())

    with_cache = partial(by_rule, rules.speculative_sampling)
    without_cache = partial(by_rule, rules.speculative_sampling_v2)
    # which it sets again before each number
    with_a_seed = partial(by_rule, rules.speculative_sampling, random_seed=1)


if "ROMSTO" in os.environ:
    romstos = foreign("ROMSTO", "sampling.speculative_decoding")
    processors = foreign("ROMSTO", "utils.logits_processor")

    def romsto(**options: bool) -> tuple[int, ...]:
        """A text by ``speculative_generate``."""
        written, _ = romstos.speculative_generate(
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

    romsto_without_adjustment = partial(romsto, skip_sample_adjustment=True)


if "SWIFT" in os.environ:
    utils = foreign("SWIFT", "swift.utils", under="model")
    utils.TOPK = 2  # drafts at the one place of a round, in place of ten at several
    utils.clone_past_key_values = MagicMock()
    # Its script also imports other packages, and a block of an older transformers.
    others = ("fastchat", "fastchat.utils", "bayes_opt", "evaluation_llama")
    block = ("model.swift", "model.swift.modeling_llama", "model.swift.kv_cache")
    stubs = dict.fromkeys((*others, "evaluation_llama.eval", *block), MagicMock())
    with patch.dict(sys.modules, {**stubs, "model.swift.utils": utils}):
        script = os.path.join(os.environ["SWIFT"], "evaluation_llama", "inference_swift.py")
        forward = runpy.run_path(script)["swift_forward"]
    forward.__globals__.update(
        get_choices_list=lambda probs, **_: [
            [0] * depth + [child] for depth in range(len(probs)) for child in range(utils.TOPK)
        ],
        initialize_past_key_values=lambda model: ([], [torch.zeros(64, 1)], torch.zeros(1)),
    )

    def swift() -> tuple[int, ...]:
        """A text by ``swift_forward``, at TEMPERATURE. Its model has two parts: layers, which give
        the logits here, and a head, which passes them on.
        """
        model = Bigrams(TARGET)
        model.lm_head = lambda logits: logits
        model.model = MagicMock(side_effect=lambda input_ids, **_: [model.table.log()[input_ids]])
        model.model.layers[-1].self_attn.q_proj.weight.device = model.device
        written, *_ = forward(
            torch.tensor([PROMPT]),
            model,
            SimpleNamespace(eos_token_id=-1),
            TOKENS - 1,
            {"context_window": 0, "optimization": False},
            logits_processor=utils.prepare_logits_processor(TEMPERATURE),
        )
        return tuple(written[0, len(PROMPT) : END].tolist())


if "FAST_LLM" in os.environ:
    # Its block is of an older transformers.
    sys.modules["layerskip_modeling.modeling_layerskip_gemma2"] = MagicMock()
    loop = foreign("FAST_LLM", "self_speculative_decoding.run_self_sepculative_decoding")
    sample = loop.sample_next_token

    def fast_llm(with_residual: bool = False) -> tuple[int, ...]:
        """A text by self-speculation, in rounds of one drafted token. Its own function can draw
        from the residual, which its loop does not ask for.
        """
        tokens = SimpleNamespace(eos_token_id=-1, pad_token_id=0)
        model = Bigrams(TARGET)
        text = {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, len(PROMPT))}
        while text["input_ids"].shape[1] < END:
            loop.sample_next_token = sample
            text, drafted, _ = loop.drafter_speculative_decode(model, tokens, text, gamma=1)
            if with_residual:
                loop.sample_next_token = partial(sample, diff_probs=drafted)
            text, *_ = loop.target_speculative_decode(model, tokens, text, drafted)
        return tuple(text["input_ids"][0, len(PROMPT) : END].tolist())

    fast_llm_with_residual = partial(fast_llm, with_residual=True)
