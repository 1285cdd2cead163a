"""One bit of one replica changes: the parameter and the rank are named, nothing of it is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import param, some
from data.prepared import Prepared
from tests.training.health.injected import Rank, inject, run
from training.checkpoint import folders
from training.health import stragglers, update_policy
from training.health.replica_check import checksum, combined, sides_of
from training.progress import Progress
from training.step import StepResult

OFTEN = ("--fault.replica_check_interval", "2")
ITERS = ("--train.train_iters", "4")
SMALL = ("--train.global_batch_size", "3")
WHOLE = ("--parallel.use_distributed_optimizer", "False")
TENSOR = ("--parallel.tensor_model_parallel_size", "2", "--parallel.sequence_parallel", "True")
EXPERTS = "--model.shape mixtral_tiny --parallel.expert_model_parallel_size 2 --train.global_batch_size 4".split()


class Flip(Rank):
    """One bit of one weight on rank 1, after the update of iteration 3."""

    name = "layers.1.mlp.linear_fc1.weight"

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if progress.iteration == 3 and self.ranks.rank == 1:
            self.parameter(self.name).data.view(-1).view(torch.int32)[7] ^= 1


class OtherRate(Rank):
    """Rank 1 has learning rates of its own."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        if self.ranks.rank == 1:
            self.optimizer.param_groups[0]["lr_mult"] = 1.5


class OtherDice(Rank):
    """Rank 1 draws a random number that its TP peer does not."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.ranks.rank == 1:
            torch.rand(1)


def stopped(run_dir: Path, saved: int) -> None:
    newest = folders.latest(run_dir / "checkpoints")
    assert (newest and newest.name) == (f"iter_{saved:07d}" if saved else None)
    assert not (run_dir / "done").exists()


@pytest.mark.parametrize(
    ("world_size", "flags", "name", "words"),
    [
        (3, (*OFTEN, *WHOLE, *SMALL), "layers.1.mlp.linear_fc1.weight", " of rank 1 ("),
        (2, (*OFTEN, *TENSOR, *SMALL), "layers.2.self_attention.linear_qkv.layer_norm_weight",
         " differs between ranks 0, 1 ("),
        param((4, (*EXPERTS, *WHOLE), "layers.1.mlp.experts.linear_fc1.weight[2]", " differs between ranks 1, 3 (")),
    ],
)  # fmt: skip
def test_a_bit_that_flips_is_found(
    world_size: int, flags: tuple[str, ...], name: str, words: str, prepared: Prepared, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Flip, "name", name)
    inject(monkeypatch, Flip)
    code, failure = run(prepared, tmp_path / "run", world_size, *ITERS, *flags)
    assert code == 1
    assert failure is not None
    assert "Traceback" not in failure.text
    iteration = 3 if OFTEN[0] in flags else 4  # else seen by the save alone
    assert failure.text.startswith(f"after iteration {iteration}: {name}{words}")
    stopped(tmp_path / "run", 2)
    if world_size == 3:
        assert "differs from that of 2 others" in failure.text


@pytest.mark.parametrize(
    ("fault", "flags", "words"),
    [(OtherRate, (), "the learning rate differs between ranks 0, 1"),
     (OtherDice, TENSOR, "the random numbers of TP ranks differ")],
)  # fmt: skip
def test_what_else_must_be_the_same(
    fault: type[Rank], flags: tuple[str, ...], words: str, prepared: Prepared, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    inject(monkeypatch, fault)
    code, failure = run(prepared, tmp_path, 2, *ITERS, *OFTEN, "--train.global_batch_size", "2", *flags)
    assert code == 1
    assert failure is not None
    assert failure.text.startswith(f"after iteration 1: {words}")
    stopped(tmp_path, 0)


TIED = ("--parallel.pipeline_model_parallel_size", "2", "--model.shape", "gpt2_tiny", "--model.hidden_dropout", "0.1")
HEALTHY: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2sp pp2 tied": (4, (*TENSOR, *TIED)),
    "cp2ep2": (2, ("--model.shape", "deepseek_v3_tiny", "--parallel.expert_model_parallel_size", "2",
                   "--parallel.context_parallel_size", "2", "--precision.dtype", "bf16")),
}  # fmt: skip


@pytest.mark.parametrize("layout", some(HEALTHY, ("tp2sp pp2 tied",)))
@pytest.mark.campaign
def test_a_healthy_run_gives_no_alarm(
    layout: str, prepared: Prepared, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything on, and looked at more often than in any real run."""
    world_size, flags = HEALTHY[layout]
    busy = ("--fault.replica_check_interval", "1", "--fault.watch_interval", "2")
    monkeypatch.setattr(update_policy, "SPIKE_WINDOW", 4)
    monkeypatch.setattr(stragglers, "RATIO", 9.0)  # on a busy machine
    assert run(prepared, tmp_path, world_size, *ITERS, "--train.global_batch_size", "2", *busy, *flags) == (0, None)
    out = capfd.readouterr().out
    assert not [
        line for line in out.splitlines() if any(word in line for word in ("slower", "differ", "sigma", "grows"))
    ]
    assert not (tmp_path / "nonfinite").exists()


def test_of_many_that_differ_the_odd_ones_are_told_apart() -> None:
    assert sides_of({0: "a", 1: "a", 2: "b", 5: "a", 6: "b"}) == ([2, 6], 0, 3)
    tie = sides_of({4: "a", 7: "b", 8: "a", 9: "b"})
    assert tie == ([4, 7, 8, 9], 7, 0)
    assert tie.text("w", ["n1"]) == "w differs between ranks 4, 7, 8, 9 (n1), and no majority tells who is right"
    many = sides_of({rank: rank for rank in range(20)})
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, … (" in many.text("w", ["n1"])


def test_checksums_see_every_bit_and_every_place() -> None:
    numbers = torch.arange(1000, dtype=torch.float32)
    before = checksum(numbers).tolist()
    for place in (0, 511, 999):
        for bit in (0, 22, 30):
            changed = numbers.clone()
            changed.view(torch.int32)[place] ^= 1 << bit
            assert checksum(changed).tolist()[0] != before[0]
    swapped = numbers[torch.cat([torch.tensor([1, 0]), torch.arange(2, 1000)])].contiguous()
    assert checksum(swapped).tolist()[0] == before[0]
    assert checksum(swapped).tolist()[1] != before[1]
    one, other = checksum(numbers), checksum(numbers + 1)
    assert combined([one, other]).tolist() != combined([other, one]).tolist()
    assert checksum(numbers.bfloat16()).shape == (2,)
