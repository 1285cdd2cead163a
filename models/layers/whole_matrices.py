"""One tensor on disk of what TP splits: our modules' parameters, and matrices whose parts it splits apart, such as the
projections into a Mamba-2 mixer."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn


class SplitOverTP(nn.Module):
    """One of Triplane's modules with parameters; without ``_extra_state``, unlike Transformer Engine's."""

    tp_group: Any
    split: ClassVar[dict[str, int]] = {}
    """Dims along which TP splits parameters; those that are not here are the same on all its ranks."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, self.split, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip


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
