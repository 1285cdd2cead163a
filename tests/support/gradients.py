"""Gradients of some microbatches, as a rank holds them once they are reduced."""

from collections.abc import Sequence

import torch

from data.loader import Batch
from models.resolve import resolve
from parallel.ddp import unwrap
from parallel.groups import Ranks
from training.config.run_config import RunConfig
from training.forward_backward import forward_backward
from training.parts.model import build_parts

VOCABULARY = 257
"""Ids: rows of the embedding are padded to 384."""


def sums_and_gradients(config: RunConfig, ranks: Ranks, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """The sum of losses with the number of tokens, and each parameter's gradient by its chunk and name; of weights in
    shards this rank's part."""
    chunks = build_parts(config, resolve(config.model, VOCABULARY), ranks).chunks
    sums, reduce = forward_backward(chunks, batches, ranks, config.model.seq_length, len(batches[0].tokens))
    reduce()
    found = {"sums": sums}
    for number, chunk in enumerate(chunks):
        for name, param in unwrap(chunk).named_parameters():
            gradient = getattr(param, "main_grad", param.grad)
            assert gradient is not None, name
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            found[f"{number}.{name}"] = local.detach().float().clone()
    return found
