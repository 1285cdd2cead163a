"""A checkpoint's weights alone, into chunks of any layout: for what reads a model and does not train it."""

from pathlib import Path

import torch

from parallel.ddp import Chunks
from parallel.groups import Ranks
from program.errors import SharedMistake
from training.checkpoint import fit, optimizer_state
from training.checkpoint.agreement import gathered
from training.checkpoint.format.verify import Depth, damages
from training.checkpoint.restoring import MOST_DAMAGES, UnsoundError, read_model, sound
from training.checkpoint.storage import TensorReader

_FIX = "Give another one: python -m tools.inspect_checkpoint RUN_DIR lists them."


@torch.no_grad()
def restore_weights(
    path: Path, chunks: Chunks, ranks: Ranks, depth: Depth = "hashes", prefix: str = optimizer_state.MASTER
) -> None:
    """Fill ``chunks`` from the checkpoint ``path``, whatever layout wrote it; from the optimizer's fp32 weights where
    it holds no others. prefix: of an average that is taken in their place (chosen_weights.py).

    Its files are verified first, by all ranks together. Raises SharedMistake, the same on every rank, where it is
    damaged or of another model.
    """
    found = gathered(damages(path, depth, (ranks.rank, ranks.identity.world_size)), ranks)
    texts = list(dict.fromkeys(damage.text for damage in sorted(found)))
    if texts:
        more = f"; and {len(texts) - MOST_DAMAGES} more" if len(texts) > MOST_DAMAGES else ""
        raise SharedMistake(f"checkpoint {path} is damaged: {'; '.join(texts[:MOST_DAMAGES])}{more}. {_FIX}")
    with TensorReader(path, ranks.identity.local_world_size) as reader:
        fit.check(path, reader.shapes, optimizer_state.names_and_shapes(chunks, optimizer=None), ranks)
        try:
            with sound(ranks):
                read_model(reader, chunks, ranks, prefix)
        except UnsoundError as error:
            raise SharedMistake(f"checkpoint {path} is damaged: {error}. {_FIX}") from None
