"""Attention on torch's ``scaled_dot_product_attention``, for CPU and for CUDA without Transformer Engine.

Shape letters: s sequence, b microbatch, n query heads / TP, g key-value groups / TP, d head width, cp context ranks.
"""

import contextlib
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from models.layers import max_logits, packed
from models.layers.blockwise_attention import AttentionMask, Softmax, attend, attend_in_blocks
from models.layers.chunked import chunk_of, temperature_of
from models.layers.documents import Documents, kept_apart
from models.layers.whole_matrices import SplitOverTP
from program.errors import SharedMistake


def check_supported(config: TransformerConfig) -> None:
    """Raises SharedMistake for what only Transformer Engine's attention does: ignoring it would be silently wrong."""
    if config.apply_query_key_layer_scaling:
        raise SharedMistake(
            "model.megatron: apply_query_key_layer_scaling needs Transformer Engine's attention, which is not used."
        )


def softcap_of(config: TransformerConfig) -> float:
    """The soft cap of scores, for which mcore has no field (models/gpt.py); 0: none."""
    return float(getattr(config, "attn_logit_softcapping", 0.0))


class SDPAttention(SplitOverTP, MegatronModule):
    """Causal core attention: what mcore puts between the QKV and the output projection.

    A layer that is windowed sees ``config.window_size[0]`` tokens before each query's own, and documents see only
    themselves (models/layers/documents.py). Context parallelism gathers keys and values of the whole sequence: simple,
    exact, and cheap with few KV groups. With ``config.softmax_type`` "learnable" or "off-by-one" each head's softmax
    has one more logit (mcore's ``softmax_offset``), which takes weight from all tokens. Chunks and growing queries are
    Llama-4's (models/layers/chunked.py).
    """

    config: TransformerConfig
    split: ClassVar = {"softmax_offset": 0}
    softmax_offset: Tensor | None
    """[heads / TP], learned or 0."""
    current_max_attn_logits: Tensor | None
    """With ``config.log_max_attention_logit`` (models/layers/max_logits.py)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        self.softcap = softcap_of(config)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.left = config.window_size[0] if windowed and config.window_size[0] >= 0 else None
        self.chunk, self.temperature = chunk_of(config, layer_number), temperature_of(config, layer_number)
        self.cp_group = pg_collection.cp if pg_collection and config.context_parallel_size > 1 else None
        self.tp_group = pg_collection.tp if pg_collection else None
        self.collects = config.log_max_attention_logit
        if self.collects:
            self.current_max_attn_logits = None
        self.softmax_offset = None
        if config.softmax_type != "vanilla":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            zeros = torch.zeros(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = nn.Parameter(zeros) if config.softmax_type == "learnable" else zeros

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **kwargs: Any) -> Tensor:
        """query [s/cp, b, n, d], key and value [s/cp, b, g, d] -> [s/cp, b, n * d], in the input's dtype.

        kwargs: of all that mcore passes, ``packed_seq_params`` counts: Documents, or None.
        """
        documents = kwargs.get("packed_seq_params")
        if documents is None:
            return self.within_samples(query, key, value, None)
        return self.within_documents(query, key, value, documents)

    def within_samples(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        """As ``forward``."""
        sight = AttentionMask(left=self.left, documents=kept_apart(documents), chunk=self.chunk)
        if self.temperature is not None:
            query = self.temperature.apply(query, self._positions(query, documents))
        dropout = self.dropout if self.training else 0.0
        # Heads differ over TP, so must their dropout. Under sequence parallelism the whole stack is in this region.
        own_rng = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own_rng else contextlib.nullcontext():
            softmax = Softmax(scale=self.softmax_scale, softcap=self.softcap, dropout=dropout)
            out = self._attend(query, key, value, sight, softmax)
        s, b = query.shape[:2]
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)

    within_documents = within_samples
    """Apart, for models/layers/compiled.py: which keys it needs is known on the host, and other in each sample."""

    def _positions(self, query: Tensor, documents: Documents | None) -> Tensor:
        """Of this rank's tokens, within their documents where they restart: [s/cp, 1 or b]."""
        if documents is not None:
            return documents.positions.T
        s = query.shape[0]
        positions = torch.arange(s, device=query.device)
        if self.cp_group is not None:
            cp, rank, half = self.cp_group.size(), self.cp_group.rank(), s // 2
            positions = positions + torch.where(positions < half, rank * half, (2 * cp - 2 - rank) * half)
        return positions[:, None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sight: AttentionMask, softmax: Softmax) -> Tensor:
        """[b, n, s/cp, d]. This rank's two zigzag pieces (r and 2 cp - 1 - r of 2 cp) see all keys before them."""
        s, sink = query.shape[0], self.softmax_offset
        pieces: tuple[int, ...] = (0,)
        if self.cp_group is not None:
            cp, rank, half = self.cp_group.size(), self.cp_group.rank(), s // 2
            key, value = GatherZigzag.apply(key, self.cp_group), GatherZigzag.apply(value, self.cp_group)
            pieces = (rank * half, (2 * cp - 1 - rank) * half)
        if self.collects and self.training and torch.is_grad_enabled():  # of two passes by recomputation, the second
            max_logits.collect(self, query, key, sight, softmax.scale, pieces)
        if self.cp_group is not None:
            return attend_in_blocks(query, key, value, sight, softmax, pieces=pieces, sink=sink)
        plain = sink is None and not softmax.softcap and (sight.chunk is None or sight.chunk >= s)
        if (
            plain
            and sight.documents is not None
            and not packed.why_not(
                query.device, query.dtype, packed.HeadSizes.of(query, key, value), sight.left, softmax.dropout
            )
        ):
            return packed.attend_packed(query, key, value, sight.documents, sight.left, softmax.scale)
        if plain and sight.documents is None and (sight.left is None or sight.left >= s - 1):
            return attend(query, key, value, softmax)  # plain causal: needs no mask
        return attend_in_blocks(query, key, value, sight, softmax, sink=sink)


def mark_softmax_offsets(chunk: nn.Module) -> None:
    """Each TP rank has its own heads' logits: unmarked, as mcore leaves them, norms of gradients would count those of
    one rank only."""
    for name, param in chunk.named_parameters():
        if name.endswith("core_attention.softmax_offset"):
            set_tensor_model_parallel_attributes(param, is_parallel=True, dim=0, stride=1)


class GatherZigzag(torch.autograd.Function):
    """Zigzag pieces [s/cp, ...] of all context ranks -> [s, ...] in natural order; backward reduce-scatters."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, cp = group, group.size()
        half = local.shape[0] // 2
        gathered = local.new_empty((cp, 2, half, *local.shape[1:]))
        dist.all_gather_into_tensor(gathered.view(cp * 2 * half, *local.shape[1:]), local.contiguous(), group=group)
        return torch.cat([gathered[:, 0].flatten(0, 1), gathered[:, 1].flip(0).flatten(0, 1)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cp = ctx.group.size()
        half, rest = grad.shape[0] // (2 * cp), grad.shape[1:]
        first, second = grad[: cp * half].view(cp, half, *rest), grad[cp * half :].view(cp, half, *rest).flip(0)
        pieces = torch.stack([first, second], dim=1).reshape(cp * 2 * half, *rest)
        local = grad.new_empty((2 * half, *rest))
        dist.reduce_scatter_tensor(local, pieces, group=ctx.group)
        return local, None
