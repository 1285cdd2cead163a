"""The formula of models/costs/flops.py against torch's own count of what the real model multiplies, both passes."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import runs
from campaign import some
from data.loader import to_batch
from models.costs.flops import MAMBA_CHUNK, flops_per_token
from models.resolve import resolve
from models.shapes import GPTShape
from models.symbols import ATTENTIONS
from parallel import groups
from parallel.launch import Identity
from ranks import run_ranks
from training.forward_backward import run_schedule
from training.parts.model import build_parts

SAMPLES = 2
# Not mistral_tiny: attention with a window skips blocks and recomputes others, as no kernel on a GPU does.
SHAPES = "gpt2 llama3 qwen3 mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 mamba2 nemotron_h nemotron3".split()
SUITE = "gpt2 deepseek_v3 nemotron3".split()
"""Each kind of layer."""


def half_of_attention(shape: GPTShape, seq_length: int) -> float:
    """What a causal kernel leaves out and torch counts, per token: every query sees half of the keys on average; with
    Mamba-2, of those of its chunk."""
    widths = 2 * shape.query_size
    if shape.multi_latent_attention:
        widths = shape.num_attention_heads * (shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim)
    attentions = sum(bool(set(symbols) & set(ATTENTIONS)) for symbols in shape.blocks) + shape.mtp_num_layers
    mixers = sum("M" in symbols for symbols in shape.blocks)
    inner = shape.mamba_num_groups * shape.mamba_state_dim + shape.mamba_heads * shape.mamba_head_dim
    return 3 * (attentions * 2 * widths * seq_length / 2 + mixers * 2 * inner * MAMBA_CHUNK / 2)


def _counted(identity: Identity, name: str, folder: Path) -> None:
    seq_length = 2 * MAMBA_CHUNK if "mamba" in name or "nemotron" in name else 64  # the first chunk has no state
    flags = ("--model.shape", f"{name}_tiny", "--model.seq_length", str(seq_length), "--train.global_batch_size", "2")
    config = runs.configuration(folder, *flags)
    shape = resolve(config.model, 384)  # as padded: padding is multiplied too
    with groups.start(config.layout(1), identity, device="cpu", seed=1) as ranks:
        chunks = build_parts(config, shape, ranks).chunks
        window = torch.randint(0, 384, (SAMPLES, seq_length + 1), dtype=torch.int32)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run_schedule(
                chunks, [to_batch(window, ranks.device)], ranks, seq_length, SAMPLES, forward_only=False
            )  # fmt: skip
    found = counter.get_total_flops() / (SAMPLES * seq_length)
    assert found == flops_per_token(shape, seq_length) + half_of_attention(shape, seq_length)


@pytest.mark.parametrize("name", some(SHAPES, SUITE))
def test_the_formula_is_what_torch_counts(name: str, tmp_path: Path) -> None:
    run_ranks(1, _counted, name, tmp_path)
