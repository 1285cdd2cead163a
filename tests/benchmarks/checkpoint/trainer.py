"""A real model and optimizer on forked ranks, after one update, to be saved and loaded."""

import contextlib
from collections.abc import Iterator

import torch

from models.config import ModelConfig
from models.resolve import resolve
from parallel import groups
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from training.config.optimizer_config import OptimizerConfig
from training.config.run_config import RunConfig
from training.config.train_config import TrainConfig
from training.parts.model import build_parts
from training.step import RankParts

BYTES_PER_PARAMETER = 12
"""On the disk: an fp32 weight and two fp32 moments (AdamW)."""


def configuration(num_layers: int, hidden_size: int, tensor_model_parallel_size: int = 1) -> RunConfig:
    """A Llama-like model in fp32 whose optimizer is split over the data-parallel ranks."""
    return RunConfig(
        device="cpu",
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_model_parallel_size),
        model=ModelConfig(
            shape="debug",
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=16,
            num_query_groups=16,
            ffn_hidden_size=hidden_size * 11 // 4,
            vocab_size=8192,
            seq_length=32,
        ),
        precision=PrecisionConfig(dtype="fp32"),
        train=TrainConfig(global_batch_size=8, micro_batch_size=1),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
    )


@contextlib.contextmanager
def started(config: RunConfig, identity: Identity) -> Iterator[RankParts]:
    """Groups, model and optimizer of this rank. One update with made-up gradients has filled the moments."""
    layout, shape = config.layout(identity.world_size), resolve(config.model, None)
    with groups.start(layout, identity, device="cpu", seed=1, meeting=groups.Meeting(timeout_minutes=10)) as ranks:
        parts = build_parts(config, shape, ranks)
        torch.manual_seed(identity.rank)
        for chunk in parts.chunks:
            for buffer in chunk.buffers:
                buffer.grad_data.normal_()
        parts.optimizer.step()
        yield parts
