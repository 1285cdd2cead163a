"""Documents packed into one sample, on their way through megatron-core's layers: those that do not see one another, and
those with positions of their own."""

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor


class Documents:
    """Where the documents packed into a microbatch's samples start, handed to mcore as ``packed_seq_params``.

    mcore passes it to every layer untouched. It reads ``qkv_format``, where "sbhd" keeps all tensors as they are
    without documents, and ``max_seqlen_q`` and ``max_seqlen_kv``, the length that RoPE is made for. Only SDPAttention
    reads the rest: ``cu_seqlens`` where a GPU has a kernel for it (models/layers/packed.py), elsewhere ``starts``.

    RoPE need not restart with a document that sees no other: scores depend on differences of positions only, whatever
    the frequencies (arXiv:2104.09864, section 3.4.2), and those are the same within a document. Where documents see one
    another it restarts (models/layers/restarting_rope.py). Learned positions restart, in ``Batch.position_ids``.

    Transformer Engine would want its "thd" format: samples of a microbatch flattened into one row through the whole
    model, which changes the shape of all activations. Nothing here makes that: it would be a second path through the
    model, which no CPU can run and so no test here could compare with one rank. With packed documents, attention is
    Triplane's among Transformer Engine's other modules, too (models/layers/spec.py), and flattens for itself alone.
    """

    qkv_format: Literal["sbhd"] = "sbhd"

    def __init__(self, starts: Tensor | None, positions: Tensor, context_parallel_size: int = 1) -> None:
        """starts: [b, s/cp] int64, for each token on this rank the position in its sample at which its document
        starts; None: documents see one another. positions: [b, s/cp] int64, of each token, as the model counts them."""
        self._starts, self.positions = starts, positions
        self.max_seqlen_q = self.max_seqlen_kv = positions.shape[1] * context_parallel_size

    @property
    def apart(self) -> bool:
        """They do not see one another."""
        return self._starts is not None

    @property
    def starts(self) -> Tensor:
        """Of documents that are apart."""
        assert self._starts is not None
        return self._starts

    @cached_property
    def seq_idx(self) -> Tensor:
        """[b, s] int32, equal numbers for tokens of one document: what Mamba-2's kernels ask for. Of whole samples."""
        return self.starts.int().contiguous()

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the row of all samples, one after another, and where the last ends:
        [documents + 1] int32, on the device. Of whole samples, so without context parallelism. On a GPU this waits for
        the device, once a microbatch, since only it knows how many there are."""
        samples, length = self.starts.shape
        positions = torch.arange(length, device=self.starts.device)
        begins = (self.starts == positions).flatten().nonzero().flatten()
        return torch.cat([begins, begins.new_tensor([samples * length])]).int()

    @cached_property
    def earliest(self) -> list[int]:
        """For each of the s/cp tokens, the smallest start over the samples. On a GPU this waits for the device, once
        a microbatch: which keys a block of queries needs must be known on the host."""
        return self.starts.amin(dim=0).tolist()


def kept_apart(documents: Documents | None) -> Documents | None:
    """For a layer that computes with where documents start alone: None where they see one another."""
    return documents if documents is not None and documents.apart else None
