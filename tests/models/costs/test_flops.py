"""FLOPs per token against sums done by hand and published formulas; device peaks against datasheets."""

import dataclasses

import pytest

from models.costs.flops import (
    DEVICES,
    DType,
    flops_per_token,
    hardware_flops_per_token,
    mean_chunk_keys,
    peak_flops,
)
from models.families import named
from models.shapes import GPTShape

# h 8, f 16, 2 heads of 4 in 1 group, 3 blocks, 10 words, sequence 6. Forward, per token, in multiply-adds:
PROJECTIONS = 8 * 8 + 2 * 8 * 4 + 8 * 8  # queries, key and value of one group, output
ATTENTION = 8 * 3 + 8 * 3  # scores and weighted values over 6 / 2 keys
MLP = 3 * 8 * 16  # swiglu
LOGITS = 8 * 10
SEQ_LENGTH = 6


def tiny(**changes: object) -> GPTShape:
    sizes = {"num_layers": 3, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"num_query_groups": 1, "kv_channels": 4, "vocab_size": 10}
    return dataclasses.replace(named("debug"), **(sizes | changes))  # type: ignore[arg-type]


def test_model_flops_by_hand() -> None:
    forward = 2 * (3 * (PROJECTIONS + ATTENTION + MLP) + LOGITS)
    assert flops_per_token(tiny(), SEQ_LENGTH) == 3 * forward


def test_ungated_mlp_has_two_matrices() -> None:
    difference = flops_per_token(tiny(), SEQ_LENGTH) - flops_per_token(tiny(activation="gelu"), SEQ_LENGTH)
    assert difference == 6 * 3 * 8 * 16


def test_a_chunk_is_seen_to_half_and_what_is_left_of_one_too() -> None:
    """Six tokens in chunks of four: means of 4 / 2 over four tokens, of 2 / 2 over two."""
    assert mean_chunk_keys(4, SEQ_LENGTH) == (4 * 2 + 2 * 1) / 6
    chunked = tiny(attention_chunk_size=4, no_rope_freq="3")
    saved = 2 * (2 * 8) * (SEQ_LENGTH / 2 - mean_chunk_keys(4, SEQ_LENGTH))
    assert flops_per_token(tiny(), SEQ_LENGTH) - flops_per_token(chunked, SEQ_LENGTH) == pytest.approx(3 * 2 * saved)


def test_biases_of_experts_are_no_products() -> None:
    with_biases = named("gpt_oss_tiny")
    without = dataclasses.replace(with_biases, add_bias_linear=False)
    assert flops_per_token(with_biases, SEQ_LENGTH) == flops_per_token(without, SEQ_LENGTH)


def test_padding_of_the_vocabulary_does_not_count() -> None:
    assert flops_per_token(tiny(make_vocab_size_divisible_by=1), SEQ_LENGTH) == flops_per_token(tiny(), SEQ_LENGTH)


def test_model_flops_of_gpt3_are_the_megatron_paper_s() -> None:
    # arXiv:2104.04473, equation 3, without its recomputation and with causal attention: see flops_per_token.
    layers, hidden, seq_length, vocab = 96, 12288, 2048, 50257
    expected = 72 * layers * hidden**2 * (1 + seq_length / (12 * hidden) + vocab / (12 * layers * hidden))
    assert flops_per_token(named("gpt3_175b"), seq_length) == pytest.approx(expected, rel=1e-12)


def test_full_recomputation_of_gpt3_is_the_megatron_paper_s() -> None:
    layers, hidden, seq_length, vocab = 96, 12288, 2048, 50257
    expected = 96 * layers * hidden**2 * (1 + seq_length / (12 * hidden) + vocab / (16 * layers * hidden))
    found = hardware_flops_per_token(
        named("gpt3_175b"),
        seq_length,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=4,
    )
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "recompute, extra",
    [
        ({}, 0),
        ({"recompute_granularity": "selective"}, 3 * ATTENTION),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
            3 * (ATTENTION + MLP),
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            3 * (PROJECTIONS + ATTENTION + MLP),
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
            PROJECTIONS + ATTENTION + MLP,
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
                "layers_per_chunk": [2, 1, 0],
            },
            2 * (PROJECTIONS + ATTENTION + MLP),
        ),
    ],
)
def test_recomputation_adds_forward_passes(recompute: dict[str, object], extra: int) -> None:
    found = hardware_flops_per_token(tiny(), SEQ_LENGTH, **recompute)  # type: ignore[arg-type]
    assert found - flops_per_token(tiny(), SEQ_LENGTH) == 2 * extra


@pytest.mark.parametrize(
    "name, dtype, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A100-PCIE-40GB", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA GB300", "fp4", 15000),
        ("NVIDIA B200", "fp4", 9000),
        ("NVIDIA H100 80GB HBM3", "fp4", None),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("AMD EPYC 7742", "fp32", None),
    ],
)
def test_peak_of_a_device(name: str, dtype: DType, tflops: float | None) -> None:
    found = peak_flops(name, dtype)
    assert found is None if tflops is None else found == tflops * 1e12


def test_no_peak_is_a_sparse_figure() -> None:
    """fp8 is twice bf16, bf16 at most twice tf32: a sparse figure in any of them would break a ratio."""
    for words, peaks in DEVICES:
        if peaks.fp8 is not None and peaks.bf16 is not None:
            assert peaks.fp8 == pytest.approx(2 * peaks.bf16, rel=0.02), words
        if peaks.tf32 is not None and peaks.bf16 is not None:
            assert peaks.bf16 == pytest.approx(2 * peaks.tf32, rel=0.02), words
