"""cuDNN's fused attention, in fp32 with all scores at once: forward, backward, and when it would be chosen.

Queries, keys and values are [s, b, heads, d] or [b, s, heads, d], by the layout's name. Dropout, biases, packed (THD)
and paged sequences are not emulated: the backend is not offered for them, and Transformer Engine takes another.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.te.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_QKV_Format,
    NVTE_Softmax_Type,
)
from tests.gpu_path.te.kernels import TORCH_DTYPES, kernel

ORDER = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3)}
"""How a format becomes [b, heads, s, d]; ORDER_BACK is the way back."""
ORDER_BACK = {"SBHD": (2, 0, 1, 3), "BSHD": (0, 2, 1, 3)}


def _format(layout: Any) -> str:
    """SBHD for NVTE_SBHD_SB2HD, for NVTE_SBH3D and for NVTE_SBHD."""
    return layout.name.removeprefix("NVTE_").split("_")[0].replace("2", "").replace("3", "")


@kernel
def get_fused_attn_backend(
    is_training: bool, q_dtype: Any, kv_dtype: Any, qkv_layout: Any, bias_type: Any, attn_mask_type: Any,
    softmax_type: Any, p_dropout: float, num_attn_heads: int, num_gqa_groups: int, max_seqlen_q: int,
    max_seqlen_kv: int, head_dim_qk: int, head_dim_v: int, window_size_left: int, window_size_right: int,
    return_max_logit: bool, cuda_graph: bool, deterministic: bool,
) -> NVTE_Fused_Attn_Backend:  # fmt: skip
    computable = (
        TORCH_DTYPES.get(int(q_dtype)) in (torch.bfloat16, torch.float16)
        and _format(qkv_layout) in ORDER
        and bias_type == NVTE_Bias_Type["NVTE_NO_BIAS"]
        and softmax_type == NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"]
        and p_dropout == 0
        and head_dim_qk % 8 == head_dim_v % 8 == 0
        and not return_max_logit
    )
    if computable:
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


@dataclass(kw_only=True, slots=True)
class _Mask:
    kind: str
    window: tuple[int, int]
    bottom_right: bool
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor

    def hidden(self, queries: int, keys: int) -> Tensor:
        """Of [b, 1, queries, keys]: what a query does not see. Lengths stay on the device."""
        device = self.cu_seqlens_q.device
        query = torch.arange(queries, device=device).view(1, 1, -1, 1)
        key = torch.arange(keys, device=device).view(1, 1, 1, -1)
        length_q, length_kv = (lengths.diff().view(-1, 1, 1, 1) for lengths in (self.cu_seqlens_q, self.cu_seqlens_kv))
        at = query + (length_kv - length_q) if self.bottom_right or "BOTTOM_RIGHT" in self.kind else query
        hidden = torch.zeros(len(length_q), 1, queries, keys, dtype=torch.bool, device=device)
        if "PADDING" in self.kind:
            hidden = hidden | (key >= length_kv) | (query >= length_q)
        left, right = self.window
        if "CAUSAL" in self.kind:
            right = 0
        if right >= 0:
            hidden = hidden | (key > at + right)
        if left >= 0:
            hidden = hidden | (key < at - left)
        return hidden


def _scores(q: Tensor, k: Tensor, scale: float, mask: _Mask) -> Tensor:
    """[b, heads, queries, keys]; each group of heads shares keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    return scores.masked_fill(mask.hidden(q.shape[2], k.shape[2]), float("-inf"))


@kernel
def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: Any, o_format: Any, qkv_scale_inv_format: Any, bias_type: Any, attn_mask_type: Any,
    softmax_type: Any, window_size: tuple[int, int], bottom_right_diagonal: bool, cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor, Q: Tensor, K: Tensor, V: Tensor, fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None, cu_seqlens_kv_padded: Tensor | None, page_table_k: Tensor | None,
    page_table_v: Tensor | None, s_quantizer: Any, o_quantizer: Any, Bias: Tensor | None,
    SoftmaxOffset: Tensor | None, rng_gen: torch.Generator | None, rng_elts_per_thread: int, return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:  # fmt: skip
    """[output, log of the sums of exponentials [b, heads, queries, 1], state of random numbers]."""
    if o_quantizer is not None:
        raise NotImplementedError("attention in fp8 is not emulated")
    q, k, v = (each.permute(ORDER[_format(qkv_layout)]).float() for each in (Q, K, V))
    mask = _Mask(
        kind=attn_mask_type.name, window=(window_size[0], window_size[1]), bottom_right=bottom_right_diagonal,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
    )  # fmt: skip
    scores = _scores(q, k, attn_scale, mask)
    sums = torch.logsumexp(scores, -1, keepdim=True)
    probabilities = torch.exp(scores - sums).nan_to_num(0.0)  # a query that sees nothing gives zeros
    output = probabilities @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    result = output.permute(ORDER_BACK[_format(NVTE_QKV_Format(o_format))]).to(fake_dtype).contiguous()
    return [result, sums, torch.zeros(2, dtype=torch.int64, device=Q.device)]


@kernel
def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool, qkv_layout: Any,
    o_format: Any, do_format: Any, dqkv_layout: Any, qkv_scale_inv_format: Any, do_scale_inv_format: Any,
    bias_type: Any, attn_mask_type: Any, softmax_type: Any, window_size: tuple[int, int],
    bottom_right_diagonal: bool, deterministic: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, Q: Tensor,
    K: Tensor, V: Tensor, O: Tensor, dO: Tensor, fake_dtype: torch.dtype, Aux_CTX_Tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor | None, cu_seqlens_kv_padded: Tensor | None, s_quantizer: Any, dp_quantizer: Any,
    dqkv_quantizer: Any, cuda_graph: bool,
) -> list[Tensor | None]:  # fmt: skip
    """[dQ, dK, dV, dBias, dSoftmaxOffset]. Probabilities come from the sums that were kept, which context parallelism
    has corrected by then to those of the whole sequence."""
    q, k, v = (each.permute(ORDER[_format(qkv_layout)]).float() for each in (Q, K, V))
    output = O.permute(ORDER[_format(NVTE_QKV_Format(o_format))]).float()
    grad = dO.permute(ORDER[_format(NVTE_QKV_Format(do_format))]).float()
    mask = _Mask(
        kind=attn_mask_type.name, window=(window_size[0], window_size[1]), bottom_right=bottom_right_diagonal,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
    )  # fmt: skip
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    probabilities = torch.exp(_scores(q, k, attn_scale, mask) - Aux_CTX_Tensors[0].float()).nan_to_num(0.0)
    products = grad @ v.repeat_interleave(shared, 1).transpose(-1, -2)
    inner = probabilities * (products - (grad * output).sum(-1, keepdim=True)) * attn_scale
    back = ORDER_BACK[_format(dqkv_layout)]

    def of_groups(each: Tensor) -> Tensor:
        return each.unflatten(1, (groups, shared)).sum(2)

    dq = inner @ k.repeat_interleave(shared, 1)
    dk, dv = of_groups(inner.transpose(-1, -2) @ q), of_groups(probabilities.transpose(-1, -2) @ grad)
    return [*(each.permute(back).to(fake_dtype).contiguous() for each in (dq, dk, dv)), None, None]
