"""Checkpoints on ranks, for tests: a small model on a layout, its global tensors, and what saves and restores them."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.resolve import resolve
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from ranks import run_ranks
from tests.faults.trainer import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SEQ_LENGTH, VOCABULARY, FaultTrainer, held
from training import checkpoint
from training.config.checkpoint_config import CheckpointConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.parts.model import build_parts
from training.progress import Progress

SAVED_AT, UNTIL = 2, 4
OWN = CheckpointConfig()


def configuration(parallel: ParallelConfig, dtype: str = "fp32", **model: Any) -> RunConfig:
    return RunConfig(
        parallel=parallel,
        model=ModelConfig(**{"seq_length": SEQ_LENGTH, "vocab_size": VOCABULARY, **model}),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        train=TrainConfig(global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE, seed=7),
    )


def sizes(tp: int = 1, pp: int = 1, vpp: int | None = None, **more: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        **more,
    )


@dataclasses.dataclass
class Parts(FaultTrainer):
    """A rank's model and optimizer, and how far they have come."""

    def keep(self, root: Path, **more: Any) -> Path:
        """A checkpoint of this moment; of all, three are kept."""
        return self.save(root, checkpoint.Contents(**{"keep": 3, **more}))

    def restore(self, root: Path, config: CheckpointConfig = OWN) -> checkpoint.Restored:
        restored = checkpoint.restore(root, config, self.chunks, self.optimizer, self.ranks)
        assert restored is not None
        self.progress = restored.progress
        return restored


def on_ranks(world_size: int, config: RunConfig, check: Callable[..., None], *args: Any) -> None:
    """Call ``check(parts, *args)`` on every rank of a layout."""

    def run(identity: Identity) -> None:
        layout = config.layout(world_size)
        with groups.start(layout, identity, device="cpu", seed=config.train.seed, parallel=config.parallel) as ranks:
            check(Parts(build_parts(config, resolve(config.model, VOCABULARY), ranks)), *args)

    run_ranks(world_size, run)


def assembled(parts: Parts, folder: Path) -> dict[str, torch.Tensor] | None:
    """On rank 0: every global tensor. Copies must agree bit for bit, and each element is some rank's."""
    folder.mkdir(parents=True, exist_ok=True)
    with checkpoint.settled(parts.chunks):
        pieces = [(name, shape, offset, data.detach().clone()) for name, shape, offset, data in held(parts)]
    torch.save(pieces, folder / f"{parts.ranks.rank}.pt")
    dist.barrier()
    if parts.ranks.rank:
        return None
    whole: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.pt"):
        for name, shape, offset, data in torch.load(path):
            tensor = whole.setdefault(name, torch.full(shape, math.nan, dtype=data.dtype))
            view = tensor[tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))]
            assert bool((view.isnan() | (view == data)).all()), f"copies of {name} differ"
            view.copy_(data)
    assert not [name for name, tensor in whole.items() if bool(tensor.isnan().any())]
    return whole


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def save_and_go_on(parts: Parts, folder: Path, until: int = UNTIL) -> None:
    """Leave a checkpoint of iteration ``SAVED_AT``, the global tensors in it, and the losses that follow."""
    parts.train(SAVED_AT)
    parts.keep(folder / "checkpoints", entries={"note": [1, None, 0.1]}, texts={"config.toml": "x = 1\n"})
    whole = assembled(parts, folder / "source")
    losses = parts.train(until)
    if whole is not None:
        torch.save(whole, folder / "global.pt")
        (folder / "losses.json").write_text(json.dumps(losses))


def restore_and_compare(parts: Parts, folder: Path, pieces: Path, tolerance: float) -> None:
    restored = parts.restore(folder / "checkpoints")
    assert restored.progress == Progress(iteration=SAVED_AT, consumed_samples=SAVED_AT * GLOBAL_BATCH_SIZE)
    assert restored.optimizer_restored
    assert restored.rng_restored == (restored.layout_before == parts.ranks.layout)
    assert restored.entries == {"note": [1, None, 0.1]}
    whole = assembled(parts, pieces)
    if whole is not None:
        assert differing(whole, torch.load(folder / "global.pt")) == []
    losses = json.loads((folder / "losses.json").read_text())
    assert parts.train(SAVED_AT + len(losses)) == pytest.approx(losses, rel=tolerance)


def restore_bits(parts: Parts, folder: Path, saved: Path, pieces: Path) -> None:
    """What a checkpoint in ``folder`` holds is what ``save_and_go_on`` left in ``saved``."""
    parts.restore(folder / "checkpoints")
    whole = assembled(parts, pieces)
    if whole is not None:
        assert differing(whole, torch.load(saved / "global.pt")) == []


def deepseek_on(parallel: ParallelConfig) -> RunConfig:
    """Latent attention, experts with a bias that no gradient moves, shared experts, multi-token prediction."""
    return configuration(parallel, shape="deepseek_v3_tiny")
