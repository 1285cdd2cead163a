"""Batches without a corpus: random tokens, the same on every run."""

import torch

from data.loader import Batch, to_batch
from training.config.run_config import RunConfig


class RandomTokens:
    """Stands for a ``BatchStream``: each data rank's microbatches of uniformly random ids below ``limit``.

    With ``limit`` below the vocabulary a model has something to learn: which ids occur.
    """

    def __init__(
        self,
        config: RunConfig,
        limit: int,
        *,
        dp: int = 1,
        dp_rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        train = config.train
        self.limit, self.device = limit, device or torch.device("cpu")
        self.samples = train.global_batch_size // dp
        self.micro_batch_size, self.global_batch_size = train.micro_batch_size, train.global_batch_size
        self.consumed_samples = 0
        self.generator = torch.Generator().manual_seed(1 + dp_rank)

    def next(self, seq_length: int) -> list[Batch | None]:
        """The microbatches of the next iteration. Batch tensors are [b, s]."""
        self.consumed_samples += self.global_batch_size
        size = (self.samples, seq_length + 1)
        windows = torch.randint(self.limit, size, dtype=torch.int32, generator=self.generator)
        return [to_batch(window, self.device) for window in windows.split(self.micro_batch_size)]
