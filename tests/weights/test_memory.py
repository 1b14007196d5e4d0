"""Memory estimate from the config: published sizes, peaks of torch's allocations, and the
refusal.
"""

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.drafters import ModelDrafter
from decoding.policies import FixedLength
from decoding.randomness import SeededRandomness
from decoding.sampling import SamplingParams
from decoding.speculate import speculate
from decoding.text import Conditions, Text
from decoding.verify import verify_by_ratio
from model.config import ModelConfig, parse_config
from model.decoder import Decoder
from model.fast import accelerate
from model.plan import LOW_BITS, LayerPlan
from tests.configs import FAMILIES
from tests.laws import prefilled
from tests.oracle import configs
from tests.peak import held_bytes, peak_bytes
from tests.refusal import refusal
from weights import memory
from weights.memory import Memory, check_fits, estimate, free_bytes, low_bit_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), positions=st.integers(1, 70))
def test_weights_and_cache_are_counted_to_the_byte(family, data, positions):
    """Those of a draft model too, which shares the workspace."""
    config = parse_config(data.draw(configs(family)))
    model = Decoder(config).to(data.draw(st.sampled_from([torch.bfloat16, torch.float32])))
    how = {"prompt": 1, "longest_draft": 8}
    needed = estimate(config, model.dtype, positions, CPU, **how)
    cache = model.new_cache(positions)
    assert needed.weights == held_bytes(model)
    assert needed.cache == sum(tensor.nbytes for tensor in [*cache.keys, *cache.values])
    both = estimate(config, model.dtype, positions, CPU, **how, draft_config=config)
    assert (both.weights, both.cache) == (2 * needed.weights, 2 * needed.cache)
    assert both.workspace == needed.workspace


@torch.inference_mode()
def decode(
    config: ModelConfig, dtype: torch.dtype, prompt: int, positions: int, gamma: int
) -> None:
    """Make a model, prefill and decode to the end, ``gamma`` tokens drafted a round."""
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype).to_empty(device=CPU)
    for parameter in model.parameters():
        parameter.fill_(0.01)
    text = Text([1] * prompt, Conditions(positions - prompt), model)
    cache = prefilled(model, text.tokens, positions)
    drafter = ModelDrafter(model, cache, LayerPlan.full(config.num_layers))
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
    how = FixedLength(gamma), params, SeededRandomness(0), verify_by_ratio
    assert list(speculate(model, cache, text, drafter, *how))


SHAPES = {
    "llama, few key heads": {
        "model_type": "llama", "vocab_size": 8000, "hidden_size": 288, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "llama, large vocabulary": {
        "model_type": "llama", "vocab_size": 30000, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True,
    },
    "gemma-2": {
        "model_type": "gemma2", "vocab_size": 16000, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "sliding_window": 300,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "prompt", "positions", "gamma", "dtype"),
    [
        ("gemma-2", 40, 60, 2, torch.bfloat16),
        ("llama, large vocabulary", 40, 84, 40, torch.float32),
        ("llama, few key heads", 600, 610, 8, torch.bfloat16),
        ("gemma-2", 1100, 1110, 8, torch.float32),
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_peak_that_torch_takes(
    shape: str, prompt: int, positions: int, gamma: int, dtype: torch.dtype
) -> None:
    config = parse_config(SHAPES[shape] | {"max_position_embeddings": 4096})
    needed = estimate(config, dtype, positions, CPU, prompt=prompt, longest_draft=gamma)
    gc.collect()
    peak = peak_bytes(lambda: decode(config, dtype, prompt, positions, gamma), CPU)
    assert needed.total - needed.buffers == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("bits", LOW_BITS)
def test_the_estimate_of_low_bit_copies_is_within_a_tenth_of_their_bytes(
    bits: int,
) -> None:
    config = parse_config(SHAPES["gemma-2"])
    model = accelerate(Decoder(config).bfloat16())
    if bits not in model.abilities.low_bits:
        pytest.skip("no low bits here: there is no C compiler")
    plan = LayerPlan.full(config.num_layers).in_bits(bits, head=bits)
    model.prepare(plan)
    made = sum(copy.nbytes for copy in model.copies.values())
    assert made == pytest.approx(low_bit_bytes(config, plan), rel=0.1)


def test_what_does_not_fit_is_refused_with_the_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = Memory(
        weights=18_500_000_000, cache=1_400_000_000, workspace=300_000_000, positions=8192
    )
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed.total)
    line = check_fits(needed, CPU)
    assert line.endswith(", workspace: 300.0 MB, total: 20.2 GB, free: 20.2 GB")
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed.total - 1)
    assert f"the model does not fit on cpu: {line}; give" in refusal(check_fits, needed, CPU)


def test_a_containers_limit_bounds_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    for name, content in {
        "memory.stat": "anon 700\ninactive_file 250\n",
        "memory.current": "1000\n",
        "memory.max": "4000\n",
    }.items():
        assert free_bytes(CPU) > 1 << 20, "no container"
        (tmp_path / name).write_text(content)
    assert free_bytes(CPU) == 3250, "files kept in memory give way"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) > 1 << 20
