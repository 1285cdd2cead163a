"""The proof that the layout does not change the result can fail, and reads a layout's name. Proofs: test_layouts.py."""

import dataclasses
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from data.prepared import Prepared
from models.config import ModelConfig
from models.costs.candidate import Candidate
from models.kernels import KernelsConfig
from models.resolve import resolve
from parallel.config import PrecisionConfig
from program.errors import UserError
from tools import clusters
from tools.parity.compare import TOLERANCE, Observed, furthest, observe, worst_gradient
from tools.parity.layouts import shrink, with_layout
from tools.plan.search.recipe import configuration
from tools.plan.search.request import PlanRequest
from tools.plan.trace.command import traceable
from training.cli import parse
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig

RECIPE = Path(__file__).resolve().parent.parent / "slurm/recipes/debug.toml"


def shrunk(shape: str = "debug") -> RunConfig:
    config = parse.load(RECIPE)
    return shrink(dataclasses.replace(config, model=dataclasses.replace(config.model, shape=shape)))


@pytest.fixture(scope="module")
def llama(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """One rank: RMSNorm, SwiGLU, RoPE, 2 query groups, untied."""
    return observe(shrunk(), prepared, "tp1", tmp_path_factory.mktemp("llama"))


def test_a_wrong_gradient_is_named(llama: Observed) -> None:
    """The proof itself can fail: one element of one gradient off by 1e-3 of the largest is found and named."""
    spoiled = {
        name: [dataclasses.replace(piece, data=piece.data.clone()) for piece in pieces]
        for name, pieces in llama.gradients.items()
    }
    victim = spoiled["layers.2.mlp.linear_fc2.weight"][0].data
    victim[3, 5] += victim.abs().max() * 1e-3
    worst, name, _ = worst_gradient(spoiled, llama.gradients)
    assert name == "layers.2.mlp.linear_fc2.weight"
    assert worst > TOLERANCE


def test_a_missing_piece_and_a_lost_loss_are_noticed(llama: Observed) -> None:
    holes = {name: pieces for name, pieces in llama.gradients.items() if name != "output_layer.weight"}
    assert worst_gradient(holes, llama.gradients)[2] == ["output_layer.weight exists in only one of the two"]
    assert furthest(llama.loss[:-1], llama.loss) > 1
    assert furthest([float("nan")], [1.0]) > 1


def test_what_is_no_number_is_as_far_as_can_be(llama: Observed) -> None:
    """One NaN among thousands of elements; a reference with a hole; an overlap that makes up for a hole."""
    name = "layers.0.mlp.linear_fc2.weight"
    [piece] = llama.gradients[name]
    spoiled = piece.data.clone()
    spoiled[1, 2] = float("nan")
    for ours, theirs in ((spoiled, piece.data), (piece.data, spoiled)):
        sides = [{**llama.gradients, name: [dataclasses.replace(piece, data=data)]} for data in (ours, theirs)]
        assert worst_gradient(sides[0], sides[1])[:2] == (float("inf"), name)
    half = dataclasses.replace(piece, data=piece.data[: len(piece.data) // 2])
    twice = {**llama.gradients, name: [half, half]}
    assert worst_gradient(twice, llama.gradients)[2] == [f"{name} is not covered exactly once"]


def test_layout_names() -> None:
    config, world_size = with_layout(shrunk(), "tp2sppp2vpp2dp2overlapmbs2")
    parallel = config.parallel
    assert world_size == 8
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert (parallel.virtual_pipeline_model_parallel_size, parallel.sequence_parallel) == (2, True)
    assert (parallel.overlap_grad_reduce, parallel.overlap_param_gather, config.train.micro_batch_size) == (
        True,
        True,
        2,
    )
    with pytest.raises(UserError, match="cannot read"):
        with_layout(shrunk(), "tp2xx")
    config, world_size = with_layout(shrunk("mixtral_tiny"), "tp2spep2etp1allgatheraccount")
    parallel = config.parallel
    assert world_size == 2
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == (2, 1)
    assert parallel.moe_token_dispatcher_type == "allgather"
    assert parallel.account_for_embedding_in_pipeline_split
    assert parallel.account_for_loss_in_pipeline_split
    assert with_layout(shrunk("mixtral_tiny"), "tp2spep2etp2")[1] == 4  # the fewest ranks that its experts fit


def test_what_is_derived_from_a_recipe_has_none_of_its_number_formats() -> None:
    """A small model on a CPU, and plans and traces in bf16 and nvfp4, of a recipe in fp8 with graphs."""
    precision = PrecisionConfig(
        fp8="hybrid", first_last_layers_bf16=True, fp8_param_gather=True, fp8_shadow="warn:5", fp8_recipe="tensorwise"
    )
    asked = KernelsConfig(cuda_graph_impl="local")
    base = dataclasses.replace(parse.load(RECIPE), precision=precision, kernels=asked)
    assert shrink(base).problems(1) == []
    question = PlanRequest(
        model=ModelConfig(shape="debug", seq_length=64),
        cluster=clusters.load("b200_ib"),
        num_gpus=2,
        global_batch_size=2,
    )
    layouts = {name: Candidate(dp=2, zero=1, precision=name) for name in ("bf16", "nvfp4")}
    configs = {name: configuration(question, layout, base) for name, layout in layouts.items()}
    assert [configs["bf16"].problems(2), traceable(configs["bf16"]).problems(2)] == [[], []]
    assert configs["nvfp4"].precision.first_last_layers_bf16 and not configs["nvfp4"].precision.fp8_param_gather


def test_nor_what_a_gpu_leaves_to_its_host() -> None:
    base = dataclasses.replace(
        parse.load(RECIPE),
        optimizer=OptimizerConfig(optimizer_cpu_offload=True),
        train=TrainConfig(offload_modules=("core_attn",)),
    )
    assert [len(base.problems(1)), shrink(base).problems(1), traceable(base).problems(1)] == [2, [], []]
    blocks = dataclasses.replace(base, train=TrainConfig(cpu_offloading_num_layers=2))  # which a CPU can
    assert [each(blocks).train.cpu_offloading_num_layers for each in (shrink, traceable)] == [2, 0]


def test_shrinking_keeps_the_architecture() -> None:
    """Each kind of layer is still there, and numbers that a short sequence would not reach are within its reach."""
    deepseek, mistral = (resolve(shrunk(name).model, 257) for name in ("deepseek_v3", "mistral_7b"))
    assert deepseek.moe_blocks == (False, True, True, True)
    assert (deepseek.multi_latent_attention, deepseek.moe_router_score_function) == (True, "sigmoid")
    assert (deepseek.moe_router_num_groups, deepseek.mtp_num_layers) == (2, 1)
    assert deepseek.moe_shared_expert_intermediate_size > 0
    assert deepseek.rope_original_max_position_embeddings < 64
    assert all(mistral.window_blocks)
    assert mistral.window_size[0] < 64
    assert resolve(shrunk("qwen3_0_6b").model, 257).query_size == 2 * 64  # heads wider than hidden / heads
