"""Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1) on megatron-core's, with three mends."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor


class LatentAttention(MLASelfAttention):
    """mcore's MLA, right under TP with down projections that are split over TP, and with our packed documents."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron sums the gradients of every "q_layernorm" over TP (finalize_model_grads.py:453), since a head's norm
        # sees its rank's heads only. This one sees all latents on every rank: their mean is its gradient, not the sum.
        if self.config.q_lora_rank is not None and not self.config.sequence_parallel:
            for param in self.q_layernorm.parameters():
                param.average_gradients_across_tp_domain = True
        self._set_norm_epsilon(self.config.latent_norm_epsilon)

    def _set_norm_epsilon(self, epsilon: float) -> None:
        """Of the norms of latents, alone or fused into the projections behind them, which mcore builds with the
        layers' own: DeepSeek's code has 1e-6 there, whatever rms_norm_eps is."""
        norms = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
        for norm in (module for name in norms if (module := getattr(self, name, None)) is not None):
            if hasattr(norm, "eps"):
                norm.eps = epsilon

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Queries that come straight from the hidden state have no norm of their own (DeepSeek-V2-Lite).

        mcore 0.19.2 (mla_qk_norm_config.py:134) wants Transformer Engine's fused norm for their projection as soon as
        latents are normed, and would so norm the hidden state, normed already, a second time.
        """
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The queries' latents and [the keys' and values' latents, the rotary key], not split over TP.

        mcore 0.19.2 (multi_latent_attention.py:739) gathers the split latents only behind this method, and uses the
        rotary key as it comes. Every TP rank's heads read that key, so its gradient must be summed over TP; there, it
        is cut instead (the gradient is off by some 10^-2). Gathered here, mcore takes its other branch, which sums.
        """
        queries, latents = super()._qkv_down_projection(hidden_states)
        rank, rotary = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if latents.size(-1) == rank + rotary:
            return queries, latents
        latents = gather_from_tensor_model_parallel_region(latents, group=self.tp_group)
        if self.config.sequence_parallel:
            return queries, scatter_to_sequence_parallel_region(latents, group=self.tp_group)
        compressed, key = latents.split([rank, rotary], dim=-1)
        return queries, torch.cat([compressed, copy_to_tensor_model_parallel_region(key, group=self.tp_group)], dim=-1)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Documents that stay in the [s, b, h] layout concern the core attention only.

        mcore (line 756) would drop the batch dim of anything packed, whatever its format.
        """
        if packed_seq_params is not None and packed_seq_params.qkv_format != "thd":
            packed_seq_params = None
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, inference_context, **kwargs
        )
