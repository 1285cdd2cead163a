"""On a rank: each layer of Transformer Engine that a run uses, in a card's sizes, against torch in fp32."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.launch import Identity

Found = dict[str, float]
"""Differences by what was compared, as norms relative to torch's."""
BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}


def measure(_: Identity) -> dict[str, Any]:
    """Layer -> its differences, or its error's last lines; one that fails does not take the others along."""
    torch.cuda.set_device(0)
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    for name, layer in LAYERS.items():
        try:
            found[name] = layer()
        except Exception as error:  # an assertion of a library, too
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def linear(recipe: Any = None) -> Found:
    """RMSNorm and a product, forward and backward; twice, since delayed scaling learns its scale from the first."""
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(
        1024, 2048, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device="cuda"
    )  # fmt: skip
    x = torch.randn(512, 1024, **BF16, requires_grad=True)
    for _ in range(2):
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    weight, norm = layer.weight.detach().float(), layer.layer_norm_weight.detach().float()
    x32 = x.detach().float().requires_grad_()
    expected = F.rms_norm(x32, (1024,), norm, layer.eps) @ weight.t()
    expected.backward(grad.float())
    assert x.grad is not None and x32.grad is not None
    return {"output": apart(y, expected), "gradient": apart(x.grad, x32.grad)}


def fp8(kind: str) -> Callable[[], Found]:
    """The same product by a recipe of Transformer Engine's."""

    def layer() -> Found:
        from transformer_engine.common import recipe

        return linear(getattr(recipe, kind)())

    return layer


def attention(dtype: torch.dtype, width: int) -> Callable[[], Found]:
    """Causal, 8 heads over 2 groups of keys, 1,024 positions."""

    def layer() -> Found:
        import transformer_engine.pytorch as te

        length, heads, groups = 1024, 8, 2
        attend = te.DotProductAttention(
            heads, width, num_gqa_groups=groups, attn_mask_type="causal", qkv_format="sbhd"
        )  # fmt: skip
        rows = [
            torch.randn(length, 1, n, width, device="cuda", dtype=dtype, requires_grad=True)
            for n in (heads, groups, groups)
        ]
        y = attend(*rows)
        y.float().pow(2).sum().backward()
        plain = [row.detach().float().permute(1, 2, 0, 3).requires_grad_() for row in rows]
        expected = F.scaled_dot_product_attention(plain[0], plain[1], plain[2], is_causal=True, enable_gqa=True)
        expected.pow(2).sum().backward()
        grad, expected_grad = rows[0].grad, plain[0].grad
        assert grad is not None and expected_grad is not None
        output = apart(y.view(length, 1, heads, width).permute(1, 2, 0, 3), expected)
        return {"output": output, "gradient": apart(grad.permute(1, 2, 0, 3), expected_grad)}

    return layer


def adam() -> Found:
    """A step of FusedAdam against torch's AdamW."""
    import transformer_engine.pytorch as te

    fused = torch.nn.Parameter(torch.randn(10_000, device="cuda"))
    plain = torch.nn.Parameter(fused.detach().clone())
    fused.grad = torch.randn_like(fused)
    plain.grad = fused.grad.clone()
    te.optimizers.FusedAdam([fused], lr=1e-2).step()
    torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.0).step()
    return {"weights": apart(fused.detach(), plain.detach())}


def cross_entropy() -> Found:
    """Of 32,000 logits, by a Triton kernel."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    logits = torch.randn(64, 1, 32_000, device="cuda", requires_grad=True)
    labels = torch.randint(32_000, (64, 1), device="cuda")
    expected = F.cross_entropy(logits.detach().view(64, -1), labels.view(-1), reduction="none")
    return {"loss": apart(parallel_cross_entropy(logits, labels, 0.0, False, None).view(-1), expected)}


def rope() -> Found:
    """Rotary embeddings, the fused kernel against Transformer Engine's own plain one."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    x = torch.randn(128, 1, 4, 64, **BF16)
    angles = torch.outer(torch.arange(128, device="cuda").float(), torch.rand(32, device="cuda")).repeat(1, 2)
    angles = angles[:, None, None]
    return {"output": apart(apply_rotary_pos_emb(x, angles, fused=True), apply_rotary_pos_emb(x, angles, fused=False))}


def permutation() -> Found:
    """Tokens to their experts and back, by Triton kernels: nothing changes."""
    import transformer_engine.pytorch as te

    x = torch.randn(256, 512, **BF16)
    experts = torch.zeros(256, 8, device="cuda", dtype=torch.int32)
    experts.scatter_(1, torch.randint(8, (256, 1), device="cuda"), 1)
    rows, order = te.moe_permute(x, experts, num_out_tokens=256, map_type="mask")[:2]
    return {"output": apart(te.moe_unpermute(rows, order, restore_shape=x.shape, map_type="mask"), x)}


def grouped() -> Found:
    """Products of four experts in one call."""
    import transformer_engine.pytorch as te

    layer = te.GroupedLinear(4, 256, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(128, 256, **BF16, requires_grad=True)
    y = layer(x, [32] * 4)
    y.sum().backward()
    parts = [x[32 * i : 32 * i + 32].float() @ getattr(layer, f"weight{i}").float().t() for i in range(4)]
    return {"output": apart(y, torch.cat(parts))}


LAYERS: dict[str, Callable[[], Found]] = {
    "linear_bf16": linear,
    "linear_tensorwise": fp8("Float8CurrentScaling"),
    "linear_delayed": fp8("DelayedScaling"),
    "linear_blockwise": fp8("Float8BlockScaling"),
    "attention_bf16_128": attention(torch.bfloat16, 128),
    "attention_bf16_64": attention(torch.bfloat16, 64),
    "attention_fp32": attention(torch.float32, 128),
    "adam": adam,
    "cross_entropy": cross_entropy,
    "rope": rope,
    "permutation": permutation,
    "grouped": grouped,
}
