"""Sizes that Transformer Engine cannot multiply in fp8, refused before anything starts."""

import pytest

from models.config import ModelConfig
from models.families import PUBLISHED
from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from training.config.divisibility import fp8_problems


def problems(shape: str, recipe: str = "tensorwise", tp: int = 1, seq_length: int = 4096, **changes: int) -> list[str]:
    model = ModelConfig(shape=shape, seq_length=seq_length, **changes)  # type: ignore[arg-type]
    if recipe == "nvfp4":
        precision = PrecisionConfig(dtype="bf16", fp4="e2m1")
    else:
        precision = PrecisionConfig(dtype="bf16", fp8="e4m3", fp8_recipe=recipe)  # type: ignore[arg-type]
    parallel = ParallelConfig(tensor_model_parallel_size=tp, expert_tensor_parallel_size=1, sequence_parallel=tp > 1)
    return fp8_problems(model, resolve(model, None), parallel, precision, 1)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [name for name in PUBLISHED if not name.startswith("mamba2")])
def test_published_models_divide(shape: str, recipe: str) -> None:
    tp = 1 if shape in ("qwen35_27b", "qwen35_0_8b") else 2  # 48 and 16 heads have two rows each
    assert problems(shape, recipe, tp=tp) == []


def test_a_matrix_that_tp_makes_too_narrow_is_named() -> None:
    (problem,) = problems("debug", tp=2)
    assert problem == (
        "precision.fp8 with fp8_recipe tensorwise multiplies multiples of 16 only: mlp.linear_fc2.weight is 64 x 88 on "
        "a tensor rank. Change the sizes in [model] or the tensor parallelism."
    )
    assert problems("debug", tp=2, ffn_hidden_size=192) == []


def test_a_mixers_projections_are_multiplied_and_its_convolution_is_not() -> None:
    """Mamba-2's own models have heads that make odd rows; Nemotron-H's, and gated delta nets, have none."""
    (problem,) = problems("mamba2_130m")
    assert "mixer.in_proj.weight is 3352 x 768 on a tensor rank" in problem
    (problem,) = problems("qwen35_27b", "mxfp8", tp=2)
    assert "in_proj.weight is 8240 x 5120 on a tensor rank" in problem
    assert problems("mamba2_1_3b") == problems("nemotron_h_8b", tp=8) == []


def test_fp4_sums_over_multiples_of_32() -> None:
    assert problems("debug", "nvfp4", ffn_hidden_size=192) == []
    (problem,) = problems("debug", "nvfp4", ffn_hidden_size=192, seq_length=80)
    wanted = "precision.fp4 with fp4_recipe nvfp4 multiplies multiples of 32 only"
    assert problem.startswith(f"{wanted}: a microbatch has 80")


def test_experts_divide_by_their_own_tp() -> None:
    assert problems("mixtral_tiny", tp=4) == []
    found = problems("mixtral_tiny", "mxfp8", tp=4)
    assert any("linear_proj.weight is 64 x 16 on a tensor rank" in problem for problem in found)
    assert not any("experts" in problem for problem in found)


def test_weight_gradients_sum_over_tokens() -> None:
    (problem,) = problems("debug", seq_length=72)
    assert problem.endswith("a microbatch has 72 tokens on a rank. Change model.seq_length or train.micro_batch_size.")


def test_without_fp8_all_sizes_do() -> None:
    model = ModelConfig(shape="debug", seq_length=72)
    bf16 = PrecisionConfig(dtype="bf16")
    assert fp8_problems(model, resolve(model, None), ParallelConfig(), bf16, 1) == []


def test_first_and_last_layers_in_bf16_leave_some_in_fp8() -> None:
    """mcore bounds each number by a stage's layers, and counts two for each in its message."""
    model = ModelConfig(shape="debug", ffn_hidden_size=192)
    precision = PrecisionConfig(dtype="bf16", fp8="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=3)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    found = fp8_problems(model, resolve(model, None), parallel, precision, 1)
    assert [problem.split(".")[1].split(" ")[0] for problem in found] == [
        "num_layers_at_start_in_bf16",
        "first_last_layers_bf16",
    ]
    assert "at most 2, the 4 layers over 2 pipeline ranks; found 3" in found[0]
    assert "leaves none of the 4 layers in fp8: 3 at the start and 1 at the end" in found[1]
