"""Which fused kernels are on: by device, number format, model and what a recipe says."""

import dataclasses
from typing import Any

import pytest

from models.config import ModelConfig
from models.families import named
from models.kernels import FUSIONS, KernelsConfig, KernelSetting, described, fusions_on, kernel_problems, obstacle
from parallel.config import ParallelConfig

GPU = KernelSetting(
    cuda=True, transformer_engine=True, dtype="bf16", shape=named("llama3_tiny"), parallel=ParallelConfig()
)
DENSE = {"bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion", "gradient_accumulation_fusion"}


def setting(**changes: Any) -> KernelSetting:
    return dataclasses.replace(GPU, **changes)


def test_on_a_gpu_with_transformer_engine_all_that_fit_are_on() -> None:
    assert fusions_on(KernelsConfig(), GPU) == DENSE


@pytest.mark.parametrize(
    "changes, off",
    [
        ({"cuda": False}, set(FUSIONS)),
        ({"transformer_engine": False}, set(FUSIONS) - {"bias_activation_fusion"}),
        ({"dtype": "fp32"}, {"cross_entropy_loss_fusion"}),
        ({"dtype": "fp16"}, {"cross_entropy_loss_fusion"}),
        ({"deterministic": True}, {"cross_entropy_loss_fusion"}),
        ({"own_loss": True}, {"cross_entropy_loss_fusion"}),
        ({"megatron": frozenset({"glu_linear_offset"})}, {"bias_activation_fusion"}),
        ({"shape": named("gpt2_tiny")}, {"apply_rope_fusion"}),
        ({"shape": dataclasses.replace(named("gpt2_tiny"), add_bias_linear=False)},
         {"apply_rope_fusion", "bias_activation_fusion"}),
        ({"shape": dataclasses.replace(named("llama3_tiny"), rope_scaling="yarn")}, {"apply_rope_fusion"}),
        ({"shape": dataclasses.replace(named("deepseek_v3_tiny"), rope_scaling="none")}, {"apply_rope_fusion"}),
        ({"shape": dataclasses.replace(named("mixtral_tiny"), activation="geglu")}, {"bias_activation_fusion"}),
        ({"shape": dataclasses.replace(named("mixtral_tiny"), add_bias_linear=True)}, {"bias_activation_fusion"}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_off(changes: dict[str, Any], off: set[str]) -> None:
    there = setting(**changes)
    assert fusions_on(KernelsConfig(), there) & DENSE == DENSE - off
    assert all(obstacle(name, there) for name in FUSIONS if name in off)


EXPERTS = {"moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"}
SPLIT = ParallelConfig(expert_model_parallel_size=2)


@pytest.mark.parametrize(
    "shape, changes, on",
    [
        (named("llama3_tiny"), {}, set()),
        (named("mixtral_tiny"), {"parallel": SPLIT}, EXPERTS),
        (named("deepseek_v3_tiny"), {}, EXPERTS),
        (named("deepseek_v3_tiny"), {"parallel": SPLIT}, {*EXPERTS, "moe_shared_expert_overlap"}),
        (named("deepseek_v3_tiny"), {"parallel": SPLIT, "recomputes_shared_experts": True}, EXPERTS),
        (named("deepseek_v3_tiny"),
         {"parallel": dataclasses.replace(SPLIT, moe_token_dispatcher_type="allgather")}, EXPERTS),
        (dataclasses.replace(named("mixtral_tiny"), moe_expert_capacity_factor=1.0,
                             moe_pad_expert_input_to_capacity=True), {}, EXPERTS - {"moe_permute_fusion"}),
    ],
)  # fmt: skip
def test_of_experts(shape: Any, changes: dict[str, Any], on: set[str]) -> None:
    assert fusions_on(KernelsConfig(), setting(shape=shape, **changes)) - DENSE == on


def test_off_is_off() -> None:
    config = KernelsConfig(off=("apply_rope_fusion",))
    assert fusions_on(config, GPU) == DENSE - {"apply_rope_fusion"} and not kernel_problems(config, GPU)


@pytest.mark.parametrize("changes", [{"cuda": False}, {"transformer_engine": False}])
def test_an_attention_is_chosen_where_transformer_engine_has_it(changes: dict[str, Any]) -> None:
    config = KernelsConfig(attention_backend="fused")
    assert not kernel_problems(config, GPU)
    [problem] = kernel_problems(config, setting(**changes))
    assert problem.startswith('kernels.attention_backend = "fused" cannot run: it needs ')


SPLIT_SEQUENCE = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"cuda": False}, "it needs a GPU"),
        ({"transformer_engine": False}, "it needs Transformer Engine, which is not installed here"),
        ({"parallel": ParallelConfig(tensor_model_parallel_size=2)}, "it needs parallel.sequence_parallel"),
        ({"shape": named("deepseek_v3_tiny")}, "it has no buffers for latent attention and multi-token prediction"),
    ],
)
def test_userbuffers_are_refused_where_they_cannot_be(changes: dict[str, Any], why: str) -> None:
    asked, there = KernelsConfig(tp_comm_overlap=True), setting(parallel=SPLIT_SEQUENCE)
    assert kernel_problems(asked, there) == []
    assert fusions_on(asked, there) == DENSE | {"tp_comm_overlap"}
    assert described(frozenset({"tp_comm_overlap"})) == "collectives of TP overlapped"
    assert kernel_problems(asked, dataclasses.replace(there, **changes)) == [
        f"kernels.tp_comm_overlap cannot run: {why}. Leave it out."
    ]


@pytest.mark.parametrize(
    "entry, expected",
    [
        ("tp_comm_overlap=True", "tp_comm_overlap is set by Triplane's own fields"),
        ("cuda_graph_impl=local", "cuda_graph_impl is set by Triplane's own fields"),
        ("qk_clip=True", "qk_clip is not supported: QK-clip, which logs the largest logit too, is optimizer.qk_clip"),
        ("external_cuda_graph=True", "external_cuda_graph is not supported: CUDA graphs are kernels.cuda_graph_impl"),
        ("gradient_accumulation_fusion=True", "gradient_accumulation_fusion is set by Triplane's own fields"),
        ("moe_permute_fusion=True", "moe_permute_fusion is set by Triplane's own fields"),
    ],
)
def test_megatrons_fields_that_would_fail_late_are_refused(entry: str, expected: str) -> None:
    [problem] = ModelConfig(megatron=(entry,)).problems()
    assert problem.startswith(f"model.megatron: {expected}")


def test_graphs_that_are_off_are_not_refused() -> None:
    assert ModelConfig(megatron=("external_cuda_graph=False", "enable_cuda_graph=False")).problems() == []


def test_graphs_are_refused_without_a_gpu() -> None:
    asked = KernelsConfig(cuda_graph_impl="local")
    assert kernel_problems(asked, setting(transformer_engine=False)) == []
    assert described(fusions_on(asked, setting(transformer_engine=False))) == "activation, layers as CUDA graphs"
    [problem] = kernel_problems(asked, setting(cuda=False))
    assert problem == 'kernels.cuda_graph_impl = "local" cannot run: it needs a GPU. Use "none".'
