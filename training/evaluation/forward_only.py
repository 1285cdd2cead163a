"""A model between two steps: forward passes that leave no trace in training."""

import contextlib
from collections.abc import Iterator

from models.layers.compiled import as_written
from parallel.ddp import Chunks
from training.checkpoint import fp8_state, settled


@contextlib.contextmanager
def forward_only(chunks: Chunks) -> Iterator[None]:
    """Within, parameters are whole and nothing is dropped; fp8's scales and histories are put back. Collective."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with settled(chunks), as_written(chunks), fp8_state.kept(chunks):
            yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
