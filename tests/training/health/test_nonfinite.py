"""A NaN in one rank's work: the right rank, layer and microbatch are named, and no weight ever sees it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import runs
from campaign import param, some
from data.prepared import Prepared
from models.resolve import resolve
from parallel import groups
from parallel.groups import Ranks
from parallel.launch import Identity
from ranks import run_ranks
from tests.training.health.injected import Rank, inject, run, tensors, to_nan
from training.checkpoint import folders
from training.config.run_config import RunConfig
from training.forward_backward import LossScale
from training.health import nonfinite, update_policy
from training.health.names import gradient_leaves
from training.health.nonfinite_locate import Evidence, NonfinitePlace, locate
from training.metrics.jsonl import read_jsonl
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests, StepResult, clip_and_update, measure

ITERS = ("--train.train_iters", "4", "--train.global_batch_size", "4")
GAP = ("--data.samples_to_skip", "1")
THREE = ("--train.train_iters", "3", "--train.global_batch_size", "4")
PIPELINE = ("--parallel.pipeline_model_parallel_size", "2")
TENSOR = ("--parallel.tensor_model_parallel_size", "2", "--parallel.sequence_parallel", "True")


class Output(Rank):
    """A module's output at iteration 3, microbatch 1 of rank 1: NaN, once or each time."""

    always = False
    path = "decoder.layers.3.mlp.linear_fc2"
    guilty = 1
    last = 3

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.calls = 0
        if self.ranks.rank == self.guilty:
            self.module(self.path).register_forward_hook(self.spoil)

    def before_step(self, progress: Progress) -> None:
        super().before_step(progress)
        self.calls = 0

    def spoil(self, module: nn.Module, _inputs: object, outputs: Any) -> Any:
        if not module.training:
            return outputs
        self.calls += 1
        microbatches = 4 // self.ranks.layout.dp
        due = 3 <= self.iteration <= self.last and (
            self.calls == 2 or (self.always and self.calls % microbatches == 2 % microbatches)
        )
        if not due:
            return outputs
        return to_nan(outputs) if isinstance(outputs, Tensor) else (to_nan(outputs[0]), *outputs[1:])


class EachTime(Output):
    always = True


class Gradient(Rank):
    """One parameter's gradient at iteration 3 on rank 1, in its last microbatch: once, while all outputs are fine."""

    name = "layers.3.mlp.linear_fc2.weight"
    times = 1

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.calls, self.left = 0, self.times
        leaves = dict(gradient_leaves(self.chunks[0]))  # by all ranks together
        if self.ranks.rank == 1:
            leaves[self.name].register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        if self.iteration != 3 or self.calls % (4 // self.ranks.layout.dp) or not self.left:
            return gradient
        self.left -= 1
        return to_nan(gradient)


class EachGradient(Gradient):
    times = 99


def found_json(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "nonfinite/iter_0000003/found.json").read_text())


@pytest.mark.parametrize(
    ("world_size", "flags", "fault", "named"),
    [
        (2, ("--parallel.overlap_grad_reduce", "True", "--parallel.overlap_param_gather", "True",
             "--model.hidden_dropout", "0.1"), Gradient,
         "the gradient of layers.3.mlp.linear_fc2.weight, on rank 1"),
        param((2, ("--parallel.data_parallel_sharding_strategy", "zero3", "--precision.dtype", "bf16"), Gradient,
               "the gradient of layers.3.mlp.linear_fc2.weight, on rank 1")),
        param((2, (*PIPELINE, "--precision.dtype", "bf16"), Output, "the forward pass, microbatch 1, on rank 1")),
    ],
)  # fmt: skip
def test_a_passing_fault_leaves_no_trace(
    world_size: int, flags: tuple[str, ...], fault: type[Rank], named: str, prepared: Prepared, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(prepared, tmp_path / "straight", world_size, *ITERS, *GAP, *flags) == (0, None)
    assert "run again" not in capfd.readouterr().out
    inject(monkeypatch, fault)
    assert run(prepared, tmp_path / "run", world_size, *ITERS, *GAP, *flags) == (0, None)
    [said] = [line for line in capfd.readouterr().out.splitlines() if "passing fault" in line]
    assert said.startswith("iteration 3: loss ")
    assert f"first in {named} (" in said
    assert tensors(tmp_path / "run", 4) == tensors(tmp_path / "straight", 4)
    found = found_json(tmp_path / "run")
    assert found["passing"]
    assert [one["rank"] for one in found["origin"]["ranks"]] == [1]
    assert found["first_sample"] == 9  # a position, behind the gap
    data = 1 if world_size == 2 and PIPELINE[0] not in flags else 0
    batch = np.load(tmp_path / f"run/nonfinite/iter_0000003/data-{data:05d}.npz", allow_pickle=False)
    assert batch["tokens"].shape == batch["labels"].shape == (2 if data else 4, 1, 64)
    assert np.array_equal(batch["tokens"][..., 1:], batch["labels"][..., :-1])


@pytest.mark.parametrize("world_size", some((2, 4), (2,)))
@pytest.mark.campaign
def test_experts_that_are_not_cut_are_named_where_weights_are_in_shards(
    world_size: int, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """EP 2: on two ranks no other rank has the same experts, on four one, in the other of HSDP's copies."""
    monkeypatch.setattr(Gradient, "name", "layers.3.mlp.experts.linear_fc2.weight[2]")
    experts = "--model.shape mixtral_tiny --parallel.expert_model_parallel_size 2".split()
    copies = ("--parallel.num_distributed_optimizer_instances", str(world_size // 2))
    shards = ("--parallel.data_parallel_sharding_strategy", "zero3", "--precision.dtype", "bf16", *copies)
    run(prepared, tmp_path / "straight", world_size, *THREE, *experts, *shards)
    inject(monkeypatch, Gradient)
    assert run(prepared, tmp_path / "run", world_size, *THREE, *experts, *shards) == (0, None)
    assert "first in the gradient of layers.3.mlp.experts.linear_fc2.weight[2], on rank 1" in capfd.readouterr().out
    assert [one["rank"] for one in found_json(tmp_path / "run")["origin"]["ranks"]] == [1]
    assert tensors(tmp_path / "run", 3) == tensors(tmp_path / "straight", 3)


def test_routers_biases_are_put_back(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They move before the update is decided on; and experts' NaN reaches other replicas within the layer."""
    monkeypatch.setattr(Output, "path", "decoder.layers.3.pre_mlp_layernorm")
    biased = "--model.moe_router_score_function sigmoid --model.moe_router_enable_expert_bias True".split()
    experts = ("--model.shape", "mixtral_tiny", "--parallel.expert_model_parallel_size", "2", *biased)
    run(prepared, tmp_path / "straight", 2, *THREE, *experts)
    inject(monkeypatch, Output)
    assert run(prepared, tmp_path / "run", 2, *THREE, *experts) == (0, None)
    assert "passing fault" in capfd.readouterr().out
    assert tensors(tmp_path / "run", 3) == tensors(tmp_path / "straight", 3)


@pytest.mark.parametrize(
    ("flags", "fault", "guilty", "named"),
    [
        param((TENSOR, EachTime, 1, "the output of layers.1.mlp.linear_fc1, microbatch 1, on rank 1 (")),
        (PIPELINE, EachTime, 0, "the output of layers.1.mlp.linear_fc2, microbatch 1, on rank 0 ("),
        (PIPELINE, EachGradient, 1, "the gradient of layers.3.mlp.linear_fc2.weight, microbatch 3, on rank 1 ("),
    ],
)
def test_what_comes_again_stops_the_run(
    flags: tuple[str, ...], fault: type[Rank], guilty: int, named: str, prepared: Prepared, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Output, "guilty", guilty)
    if flags == TENSOR:  # column-parallel: its output is this rank's alone, until the row-parallel product behind it
        monkeypatch.setattr(Output, "path", "decoder.layers.3.mlp.linear_fc1")
    inject(monkeypatch, fault)
    code, failure = run(prepared, tmp_path, 2, *ITERS, *flags)
    assert code == 1
    assert failure is not None
    assert "Traceback" not in failure.text
    assert failure.text.startswith("iteration 3: loss ")
    assert "software or data" in failure.text
    assert f"first in {named}" in failure.text
    assert f"The newest good checkpoint is {tmp_path}/checkpoints/iter_0000002." in failure.text
    newest = folders.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "iter_0000002"
    assert not found_json(tmp_path)["passing"]
    assert not (tmp_path / "done").exists()


def test_an_update_can_be_passed_over(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """But not any number of them in a row."""
    monkeypatch.setattr(nonfinite, "MOST_SKIPS", 1)
    monkeypatch.setattr(Output, "last", 4)
    inject(monkeypatch, EachTime)
    code, failure = run(prepared, tmp_path, 2, *ITERS, "--fault.nonfinite", "skip", "--log.log_interval", "1")
    assert capfd.readouterr().out.count("The update is skipped (fault.nonfinite)") == 1
    assert [line["skipped"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 0, 1]
    assert code == 1
    assert failure is not None
    assert failure.text.startswith("iteration 4: ")
    assert "1 updates in a row were skipped" in failure.text


FP16 = ("--precision.dtype", "fp16", "--precision.hysteresis", "1", "--precision.initial_loss_scale")


@pytest.mark.campaign
def test_with_fp16_too_a_passing_fault_leaves_no_trace(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Non-finite gradients lower the loss scale, which is put back before the second run."""
    monkeypatch.setattr(Output, "guilty", 0)
    assert run(prepared, tmp_path / "straight", 1, *THREE, *FP16, "1024") == (0, None)
    inject(monkeypatch, Output)
    assert run(prepared, tmp_path / "run", 1, *THREE, *FP16, "1024", "--log.log_interval", "1") == (0, None)
    out = capfd.readouterr().out
    assert "a passing fault of the hardware; first in the forward pass, microbatch 1, on rank 0 (" in out
    assert tensors(tmp_path / "run", 3) == tensors(tmp_path / "straight", 3)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [line["loss_scale"] for line in lines] == [1024] * 3
    assert [line["skipped"] for line in lines] == [0] * 3


class Overflow(Rank):
    """Each gradient of one parameter is too large for fp16, while the loss is fine."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.parameter("layers.3.mlp.linear_fc2.weight").register_hook(lambda gradient: gradient * math.inf)


def test_what_overflows_at_the_lowest_loss_scale_ends(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(update_policy, "MOST_OVERFLOWS", 2)
    inject(monkeypatch, Overflow)
    code, failure = run(prepared, tmp_path, 1, *ITERS, *FP16, "2", "--precision.min_loss_scale", "1")
    assert code == 1
    assert failure is not None
    assert failure.text.startswith(
        "iteration 3: fp16 gradients have overflowed in 2 iterations in a row, while the loss"
    )
    assert "at loss scale 1, which goes no lower" in failure.text
    assert "run again" not in capfd.readouterr().out


class BadMoment(Rank):
    """Adam's second moment is spoilt on rank 1 behind the update, when no gradient can tell."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if progress.iteration == 4 and self.ranks.rank == 1:
            from training.checkpoint.optimizer_state import held_slices

            _, held = next(held_slices(self.optimizer))
            held.tensors["exp_avg_sq"][0] = float("inf")


def test_a_poisoned_state_is_not_saved(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, BadMoment)
    code, failure = run(prepared, tmp_path, 2, *ITERS)
    assert code == 1
    assert failure is not None
    assert "after iteration 4: the optimizer's exp_avg_sq of the weight " in failure.text
    assert " on rank 1 (" in failure.text
    newest = folders.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "iter_0000002"


def _check_two_halves(identity: Identity, run_dir: Path, dtype: str, overflow: bool) -> None:
    """Gradients made ready, then the update: bit for bit what Megatron's own ``step`` does in one go."""
    flags = ("--precision.dtype", dtype, "--parallel.tensor_model_parallel_size", "2")
    config = runs.configuration(run_dir, *flags, "--precision.hysteresis", "1")
    with groups.start(config.layout(2), identity, device="cpu", seed=1) as ranks:
        ours, megatrons = (_updated(config, ranks, halves, overflow) for halves in (True, False))
    assert ours[:2] == megatrons[:2]
    assert all(map(torch.equal, ours[2], megatrons[2]))
    assert ours[1] == {"bf16": 1.0, "fp16": 32768.0 if overflow else 65536.0}[dtype]


def _updated(config: RunConfig, ranks: Ranks, halves: bool, overflow: bool) -> tuple[float | None, float, list[Tensor]]:
    """Gradient norm, loss scale afterwards, parameters. overflow: on one of two ranks."""
    parts = build_parts(config, resolve(config.model, 257), ranks)
    chunks, optimizer = parts.chunks, parts.optimizer
    params = list(chunks[0].parameters())
    for number, tensor in enumerate(params):
        tensor.main_grad.fill_(0.1 * (number % 7 + 1))
    if overflow and ranks.rank == 1:
        params[3].main_grad.view(-1)[0] = float("inf")
    before = [param.clone() for param in params]
    if halves:
        sums = torch.ones(2, dtype=torch.float64)
        gradients = measure(sums, optimizer, ranks, StepRequests(), LossScale(optimizer), samples=1)
        norm = gradients.grad_norm
        assert all(map(torch.equal, before, params))
        assert gradients.overflowed == overflow
        assert overflow or clip_and_update(optimizer, norm)
    else:
        updated, norm, _ = optimizer.step()
        assert updated != overflow
    assert overflow or not any(map(torch.equal, before, params))
    return norm, float(optimizer.get_loss_scale()), params


@pytest.mark.parametrize("dtype, overflow", [param(("bf16", False)), ("fp16", False), ("fp16", True)])
def test_an_update_in_two_halves_is_megatrons(tmp_path: Path, dtype: str, overflow: bool) -> None:
    run_ranks(2, _check_two_halves, tmp_path, dtype, overflow)


def test_the_earliest_place_is_to_blame() -> None:
    def rank(number: int, **found: Any) -> Evidence:
        return Evidence(rank=number, host=f"n{number}", stage=number % 2, data_rank=number // 2, **found)

    late, early = NonfinitePlace(3, 0, 9, "b"), NonfinitePlace(2, 1, 4, "a")
    assert str(locate([rank(0, forward=late), rank(1, forward=early)])) == (
        "a, microbatch 2, on rank 1 (n1), pipeline stage 1"
    )
    both = locate([rank(0, forward=early), rank(1, forward=early), rank(2, backward=NonfinitePlace(0, 0, 0, "c"))])
    assert "on rank 0 or 1 (n0, n1), pipeline stage 0 or 1" in str(both)
    assert str(locate([rank(3, weights=["w"]), rank(0, forward=early)])).startswith("the weight w, on rank 3")
    assert locate([rank(0)]) is None
