"""Muon's update on every layout: that of a plain PyTorch Muon on global matrices, and of Megatron's own class."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch import Tensor

from campaign import some
from checkpoint_parts import Parts, assembled, configuration, on_ranks, restore_and_compare, save_and_go_on, sizes
from models.costs.candidate import Candidate
from models.costs.states import BlockStack
from models.names import canonical
from models.resolve import resolve
from parallel import ddp
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.regions import HeldTensor
from tests.faults.trainer import VOCABULARY
from training.config.lr_schedule import ScheduledRates
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.muon.matrices import is_matrix
from training.optimizer import set_schedule
from training.step import clip_and_update

STEPS, RATE, DECAY = 2, 0.02, 0.1
MUON = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest", muon_nesterov=True, clip_grad=0.0)
QUINTIC = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # fmt: skip
"""leloykun.github.io/ponder/muon-opt-coeffs, as modded-nanogpt has them: megatron-core's default."""

ZERO_3 = {"data_parallel_sharding_strategy": "zero3"}
LAYOUTS: dict[str, tuple[int, str, ParallelConfig]] = {
    "one rank": (1, "debug", sizes(use_distributed_optimizer=False)),
    "TP2SP DP2": (4, "debug", sizes(tp=2, sequence_parallel=True, overlap_param_gather=True, overlap_grad_reduce=True)),
    "PP2 VPP2 DP2": (4, "debug", sizes(pp=2, vpp=2, ddp_bucket_size=7000)),
    "TP2 ZeRO-3 DP2": (4, "debug", sizes(tp=2, data_parallel_sharding_strategy="zero3")),
    "ZeRO-2 DP3": (3, "debug", sizes(data_parallel_sharding_strategy="zero2")),
    "HSDP": (4, "debug", sizes(data_parallel_sharding_strategy="HYBRID_SHARD", num_distributed_optimizer_instances=2)),
    "TP2 EP2": (4, "deepseek_v3_tiny", sizes(tp=2, sequence_parallel=True, expert_model_parallel_size=2)),
    "TP2 EP2 ETP1": (
        4, "mixtral_tiny",
        sizes(tp=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    ),
    "delta nets TP2": (2, "qwen3_next_tiny", sizes(tp=2, sequence_parallel=True)),
    "Mamba TP2 PP2": (4, "nemotron_h_tiny", sizes(tp=2, pp=2, sequence_parallel=True)),
}  # fmt: skip
IN_THE_SUITE = ("one rank", "TP2SP DP2", "TP2 EP2 ETP1")


def muon(shape: str, parallel: ParallelConfig, dtype: str = "fp32", **fields: Any) -> RunConfig:
    config = configuration(parallel, dtype, shape=shape)
    return dataclasses.replace(config, optimizer=dataclasses.replace(MUON, **fields))


def gradient(key: str, shape: tuple[int, ...], step: int) -> Tensor:
    """The same on every layout."""
    seed = int.from_bytes(hashlib.sha256(f"{key} {step}".encode()).digest()[:6], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(one: HeldTensor, step: int) -> None:
    """This rank's elements of the global gradient, where Megatron looks for reduced ones."""
    flat = torch.empty(sum(torch.Size(at.shape).numel() for at in one.regions))
    for at in one.regions:
        inside = tuple(slice(start, start + size) for start, size in zip(at.offset, at.shape, strict=True))
        piece = gradient(at.key, at.global_shape, step)[inside].reshape(-1)
        flat[at.start : at.start + piece.numel()] = piece
    param: Any = one.tensor
    own = flat[one.start : one.start + param.numel()].view(param.shape)
    if one.shards is None:
        param.main_grad.copy_(own)
    else:
        param.main_grad = own.clone()


def updated(parts: Parts, folder: Path) -> None:
    """Leave the global tensors before and after ``STEPS`` updates."""
    before = assembled(parts, folder / "before")
    trained = [one for chunk in parts.chunks for one in ddp.held(chunk) if one.tensor.requires_grad]
    shapes = {at.key: at.global_shape for one in trained for at in one.regions}
    embeddings = {
        one.regions[0].key for one in trained if getattr(one.tensor, "is_embedding_or_output_parameter", False)
    }
    for step in range(STEPS):
        for one in trained:
            fill(one, step)
        set_schedule(parts.optimizer, ScheduledRates(RATE, DECAY))
        parts.optimizer.prepare_grads()
        assert clip_and_update(parts.optimizer, 1.0)
    after = assembled(parts, folder / "after")
    stage: list[Any] = [None] * parts.ranks.layout.pp
    torch.distributed.all_gather_object(stage, (shapes, embeddings), group=parts.ranks.pgs.pp)
    if before is not None and after is not None:
        of_all = {key: size for own, _ in stage for key, size in own.items()}
        torch.save((before, after, of_all, {key for _, own in stage for key in own}), folder / "tensors.pt")


def plain_newton_schulz(matrix: Tensor) -> Tensor:
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / matrix.norm().clamp_min(1e-7)
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def plain_matrices(key: str, shape: str) -> tuple[int, ...]:
    """Rows of Q, K and V of a query group; of all others one matrix."""
    if not key.endswith("linear_qkv.weight"):
        return ()
    return (64, 64, 32, 32) if shape == "qwen3_next_tiny" else (32, 16, 16)


def plain_step(weight: Tensor, gradients: list[Tensor], groups: tuple[int, ...]) -> Tensor:
    """``STEPS`` of Muon on one global matrix."""
    momentum = torch.zeros_like(weight)
    for one in gradients:
        weight = weight * (1 - RATE * DECAY)
        momentum = 0.95 * momentum + 0.05 * one
        ahead = 0.05 * one + 0.95 * momentum
        pieces = ahead.view(-1, sum(groups), ahead.shape[1]).split(groups, dim=1) if groups else [ahead[None]]
        found = []
        for piece in pieces:
            matrix = piece.reshape(-1, ahead.shape[1])
            found.append((plain_newton_schulz(matrix) * max(matrix.shape) ** 0.5).view(piece.shape))
        weight = weight - RATE * torch.cat(found, dim=1).view_as(weight)
    return weight


@pytest.mark.parametrize("name", some(LAYOUTS, IN_THE_SUITE))
def test_matrices_are_updated_as_a_plain_muon_updates_them_whole(name: str, tmp_path: Path) -> None:
    world_size, shape, parallel = LAYOUTS[name]
    on_ranks(world_size, muon(shape, parallel), updated, tmp_path)
    before, after, shapes, embeddings = torch.load(tmp_path / "tensors.pt")
    compared = 0
    for key, size in shapes.items():
        if key in embeddings or len(size) < 2 or "conv1d" in key:
            continue
        gradients = [gradient(key, size, step) for step in range(STEPS)]
        weight, found = (tensors[f"param of {canonical(key)}"] for tensors in (before, after))
        experts = [...] if len(size) == 2 else range(size[0])
        for at in experts:
            expected = plain_step(weight[at], [one[at] for one in gradients], plain_matrices(key, shape))
            torch.testing.assert_close(
                found[at], expected, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
            compared += 1
    assert compared >= 8


def test_megatrons_own_class_makes_the_same_update(tmp_path: Path) -> None:
    """One rank: TensorParallelMuon on copies of its parameters."""
    on_ranks(1, muon("debug", sizes(use_distributed_optimizer=False)), _as_megatron, tmp_path)


def _as_megatron(parts: Parts, folder: Path) -> None:
    held = [one for one in ddp.held(parts.chunks[0]) if one.tensor.ndim == 2]
    ours = [one for one in held if not getattr(one.tensor, "is_embedding_or_output_parameter", False)]
    copies = [torch.nn.Parameter(one.tensor.detach().clone()) for one in ours]
    qkv = {copy for copy, one in zip(copies, ours, strict=True) if one.regions[0].key.endswith("linear_qkv.weight")}
    megatron = TensorParallelMuon(
        copies, lr=RATE, momentum=0.95, nesterov=True, weight_decay=DECAY, split_qkv=True,
        is_qkv_fn=lambda param: param in qkv, qkv_split_shapes=[32, 16, 16], fp32_matmul_prec="highest",
    )  # fmt: skip
    updated(parts, folder)
    for step in range(STEPS):
        for copy, one in zip(copies, ours, strict=True):
            copy.grad = gradient(one.regions[0].key, one.regions[0].global_shape, step)
        megatron.step()
    for copy, one in zip(copies, ours, strict=True):
        assert torch.equal(copy, one.tensor), one.regions[0].key


def test_another_layout_restores_every_bit_of_momentum_and_goes_on(tmp_path: Path) -> None:
    experts = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    source, target = sizes(tp=2, sequence_parallel=True, **experts), sizes(**ZERO_3)
    on_ranks(2, muon("mixtral_tiny", source), save_and_go_on, tmp_path)
    on_ranks(2, muon("mixtral_tiny", target), restore_and_compare, tmp_path, tmp_path / "pieces", 1e-4)


def test_the_state_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    one = sizes()
    on_ranks(1, configuration(one), save_and_go_on, tmp_path)
    with pytest.raises(AssertionError, match=r"It has another optimizer's, exp_avg and exp_avg_sq\. Use --check"):
        on_ranks(1, muon("debug", one), restore_and_compare, tmp_path, tmp_path / "there", 1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": PrecisionConfig(dtype="fp16")}, 'cannot be with precision.dtype = "fp16"'),
        ({"optimizer": dataclasses.replace(MUON, muon_num_ns_steps=0)}, "muon_num_ns_steps must be 1 or more, found 0"),
        ({"optimizer": dataclasses.replace(MUON, muon_momentum=1.0)}, "muon_momentum must be in [0, 1), found 1.0"),
        ({"optimizer": dataclasses.replace(MUON, megatron=("grad_norm_skip_threshold=9.0",))}, "grad_norm_skip_thresh"),
    ],
)
def test_what_muon_cannot_be_with(fields: dict[str, Any], said: str) -> None:
    config = dataclasses.replace(muon("debug", sizes()), **fields)
    assert [line for line in config.problems(1) if said in line]


@pytest.mark.parametrize("shape", ["debug", "gpt2_tiny"])
def test_its_state_is_as_large_as_predicted(shape: str, tmp_path: Path) -> None:
    """Learned positions are a matrix, as in Megatron-LM."""
    config = muon(shape, sizes(tp=2))
    expected = BlockStack(resolve(config.model, VOCABULARY)).held(Candidate(tp=2), 0)
    on_ranks(2, config, _holds, sum(expected[:2]), sum(expected[2:]))


def _holds(parts: Parts, elements: int, of_matrices: int) -> None:
    held = [one.tensor for chunk in parts.chunks for one in ddp.held(chunk) if one.tensor.requires_grad]
    assert sum(param.numel() for param in held) == elements
    assert sum(param.numel() for param in held if is_matrix(param)) == of_matrices
