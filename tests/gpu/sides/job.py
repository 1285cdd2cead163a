"""What each side trains: one model, one batch, one optimizer."""

from dataclasses import dataclass

import torch
from torch import nn

from data.loader import Batch
from models.init import fill_normal, std_of
from models.shapes import GPTShape
from parallel.groups import Ranks
from training.config.run_config import RunConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """On one rank, with Megatron's groups and torch's process group there."""

    config: RunConfig
    shape: GPTShape
    ranks: Ranks
    microbatches: tuple[Batch, ...]
    """Of this data rank, for every step."""


@torch.no_grad()
def fill(model: nn.Module, shape: GPTShape, seed: int) -> None:
    """Triplane's initial weights in Megatron's GPTModel, so that first losses are equal; norms stay at 1."""
    for path, param in model.named_parameters():
        name = path.removeprefix("decoder.").removeprefix("embedding.")
        if (std := std_of(name, shape)) is not None:
            fill_normal(param, seed, name, tuple(param.shape), (0,) * param.dim(), std)
