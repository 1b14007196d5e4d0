"""Parity with transformers on the real checkpoint: logits, greedy texts, tokenizer, chat
template.
"""

import math
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.run.writer import Writer
from decoding.sampling import SamplingParams
from decoding.text import Rules
from decoding.verify import Coupling
from model import Decoder
from weights.load import load_model
from weights.tokenizer import Tokenizer

transformers.logging.set_verbosity_error()

NEW_TOKENS = 24
STORY = "Once upon a time, in a small village at the foot of a mountain, there lived an old woman"
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light the most."},
        {"role": "user", "content": "And at sunset?"},
    ],
    [{"role": "user", "content": "Write a long story about a lighthouse keeper and a storm."}],
]
TEXTS = [
    "Hello, world!",
    "  leading, trailing  and   inner   spaces \t\n\n\r\n tabs",
    "0123456789 3.14159 1,000,000 2024-02-29 0x1F 1e-9",
    "naïve café — “quotes” … ½ № Ω ﬁ",
    "日本語とかな、한국어, العربية, हिन्दी, ไทย",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 \u200d \ufeff \u00a0",
    "I'll we've DON'T can't 'quoted'",
    "\x00\x01\x7f \ud7ff \uffff",
    "<|im_start|>user\nI type <|im_end|> and <|endoftext|><|im_start|>",
    "<|im_start |> <im_end> <repo_name>x<file_sep>y",
    "",
]


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Decoder:
    return load_model(smollm2, torch.float32)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


@pytest.fixture(scope="module")
def their_tokenizer(smollm2: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize(
    "conversation", CONVERSATIONS, ids=["question", "conversation", "long answer"]
)
@torch.inference_mode()
def test_plain_decoding_of_a_chat_is_transformers_greedy_text_up_to_and_with_the_end_of_turn(
    ours: Decoder,
    theirs: transformers.PreTrainedModel,
    tokenizer: Tokenizer,
    conversation: list[dict[str, str]],
) -> None:
    """By the production loop, without a draft; the logits of the whole are transformers' too."""
    prompt = tokenizer.encode_chat(conversation)
    writer = Writer(ours, len(prompt) + NEW_TOKENS)
    writer.begin(prompt)
    text = writer.new_text(Rules(NEW_TOKENS, tokenizer.eos_ids))
    plain = writer.plain, SamplingParams(), Coupling("ratio", 0)
    written = writer.write(text, *plain).tokens
    tokens = torch.tensor([prompt + written[:-1]])
    logits = theirs(tokens).logits
    assert (ours(tokens) - logits).abs().max() < 2e-3
    assert written == logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    ends = [token in tokenizer.eos_ids for token in written]
    assert len(written) == NEW_TOKENS or ends.index(True) == len(written) - 1


def test_text_ends_at_every_id_that_generate_ends_at(
    tokenizer: Tokenizer, theirs: transformers.PreTrainedModel
) -> None:
    assert tokenizer.eos_ids == set(theirs.generation_config.eos_token_id)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_token_ids_of_a_text_equal_transformers(
    tokenizer: Tokenizer, their_tokenizer: transformers.PreTrainedTokenizerBase, text: str
) -> None:
    # Typed names of control tokens are text here, as with split_special_tokens.
    assert tokenizer.encode(text) == their_tokenizer.encode(text, split_special_tokens=True)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 49151), max_size=12))
def test_any_ids_have_the_text_of_transformers(
    tokenizer: Tokenizer, their_tokenizer: transformers.PreTrainedTokenizerBase, ids: list[int]
) -> None:
    assert tokenizer.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)


# Not with the typed name of a control token: transformers makes it one.
PLAIN = [[{"role": "user", "content": text}] for text in TEXTS if "<" not in text]


@pytest.mark.parametrize("conversation", CONVERSATIONS + PLAIN, ids=ascii)
def test_a_chat_has_the_ids_of_transformers(
    tokenizer: Tokenizer,
    their_tokenizer: transformers.PreTrainedTokenizerBase,
    conversation: list[dict[str, str]],
) -> None:
    assert tokenizer.encode_chat(conversation) == their_tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )


@torch.inference_mode()
def test_the_loaded_model_predicts_real_text(ours: Decoder, tokenizer: Tokenizer) -> None:
    """A floor that no mistake shared with transformers passes: English costs less than 4 nats a
    token.
    """
    text = f"{STORY} who told stories to the children every evening."
    ids = torch.tensor(tokenizer.encode(text))
    loss = torch.nn.functional.cross_entropy(ours(ids[None])[0, :-1], ids[1:])
    assert loss < 4 < math.log(ours.vocab_size) / 2
