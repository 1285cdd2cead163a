"""One tensor on disk of a matrix whose parts TP splits apart, such as the projections into a Mamba-2 mixer."""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def one_tensor_each(found: dict[str, Any]) -> dict[str, Any]:
    """A module's sharded state with every matrix that mcore cuts into tensors, ``<key>.z`` and so on, as one tensor."""
    return {
        key: replace(entry, build_fn=partial(_one_tensor, entry.build_fn))
        if isinstance(entry, ShardedTensorFactory)
        else entry
        for key, entry in found.items()
    }


def _one_tensor(build: Any, key: str, *args: Any) -> list[ShardedTensor]:
    """The parts, each behind the other: of a matrix, as which a convolution's weights [channels, 1, taps] are saved, or
    of a vector."""
    first, found, pieces = 0, [], build(key, *args)
    total = sum(piece.global_shape[0] for piece in pieces)
    for piece in pieces:
        data = piece.data.flatten(1) if piece.data.dim() > 1 else piece.data
        columns = tuple(data.shape[1:])
        found.append(
            replace(
                piece,
                key=key,
                data=data,
                local_shape=tuple(data.shape),
                global_shape=(total, *columns),
                global_offset=(first + piece.global_offset[0], *(0 for _ in columns)),
                axis_fragmentations=None,
            )
        )
        first += piece.global_shape[0]
    return found
