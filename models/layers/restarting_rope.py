"""RoPE that restarts with each document of a sample although documents see one another (data.reset_position_ids alone).

megatron-core makes one embedding for all samples of a microbatch, and its models do not look at position ids, so that
Megatron-LM's --reset-position-ids moves learned positions alone. transformers rotates by position ids: so does this.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from models.layers.documents import Documents


def install(chunks: Sequence[MegatronModule]) -> None:
    """Let each rotary embedding be that of the positions which come with ``packed_seq_params``, where these do.

    Costs an embedding [s, b, 1, d] for each microbatch in place of one [s, 1, 1, d] for all.
    """
    for chunk in chunks:
        chunk.config.rope_restarts = True
        for owner in chunk.modules():  # a chunk, or each block's latent attention
            if isinstance(rotary := getattr(owner, "rotary_pos_emb", None), nn.Module):
                _restart(owner, rotary)


def at_positions(whole: Any, positions: Tensor) -> Any:
    """The rotary embedding [s, b, 1, d] of positions [b, s], from that of all of them, [t, 1, 1, d]; YaRN's of latent
    attention comes with a factor."""
    if isinstance(whole, Tensor):
        return whole[positions.T, 0]
    return whole[0][positions.T, 0], whole[1]


def _restart(owner: nn.Module, rotary: Any) -> None:
    current: list[Tensor | None] = [None]

    def before(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        documents: Documents | None = kwargs.get("packed_seq_params")
        current[0] = None if documents is None else documents.positions

    def forward(length: int, *args: Any, **kwargs: Any) -> Any:
        positions = current[0]
        if positions is None:
            return type(rotary).forward(rotary, length, *args, **kwargs)
        return at_positions(type(rotary).forward(rotary, length, packed_seq=True), positions)  # not cut over CP

    owner.register_forward_pre_hook(before, with_kwargs=True)
    rotary.forward = forward
