"""Routing without values: every expert gets as many tokens, since the router's choices have no values."""

from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def install() -> None:
    """Of a process that traces and does nothing else."""
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _balanced
    token_dispatcher.permute = _permute(token_dispatcher.permute)


def _balanced(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Counts as they would be on the host, at the point where they are read first."""
    if self.drop_and_pad or point != self.cuda_dtoh_point:
        return self.balanced_tokens if hasattr(self, "balanced_tokens") else tokens_per_expert
    sent = int(self.num_out_tokens)
    self.input_splits = self.output_splits = _shares(sent, self.ep_size)
    self.output_splits_tp = np.full(self.tp_size, sent)
    local = np.stack([_shares(int(share), self.num_local_experts) for share in self.output_splits])
    is_alone = self.ep_size * self.tp_size == 1
    self.num_global_tokens_per_local_expert = local[0] if is_alone else np.concatenate([local] * self.tp_size)
    chunks = np.arange(self.num_experts * self.tp_size)
    self.sort_input_by_local_experts = chunks.reshape(-1, self.num_local_experts).T.ravel()
    self.restore_output_by_local_experts = chunks.reshape(self.num_local_experts, -1).T.ravel()
    self.balanced_tokens = local.sum(axis=0) * self.tp_size
    return self.balanced_tokens


def _shares(whole: int, parts: int) -> "np.ndarray[Any, Any]":
    share, rest = divmod(whole, parts)
    return np.array([share + (number < rest) for number in range(parts)])


def _permute(original: Any) -> Any:
    """megatron-core's permute, in which the chosen tokens are as many as the router chooses, whichever they are."""

    def permute(tokens: Any, routing_map: Any, *args: Any, num_out_tokens: Any = None, **kwargs: Any) -> Any:
        select, count = torch.Tensor.masked_select, int(num_out_tokens)

        def first(values: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
            return values.reshape(-1)[:count].clone()

        torch.Tensor.masked_select = first  # type: ignore[assignment, method-assign]
        try:
            return original(tokens, routing_map, *args, num_out_tokens=num_out_tokens, **kwargs)
        finally:
            torch.Tensor.masked_select = select  # type: ignore[method-assign]

    return permute
