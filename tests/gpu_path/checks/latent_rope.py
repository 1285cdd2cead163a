"""Megatron's Triton kernels of latent attention's rotary embedding against te/latent_rope.py: values and gradients."""

import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as kernels
from torch import Tensor

from tests.gpu_path.te import latent_rope

SEQ, BATCH, HEADS, PLAIN, TURNED, VALUES = 3, 2, 2, 4, 8, 4


def check() -> None:
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).cuda()

    cos, sin = drawn(SEQ, 1, 1, TURNED), drawn(SEQ, 1, 1, TURNED)
    q, kv = drawn(SEQ, BATCH, HEADS, PLAIN + TURNED), drawn(SEQ, BATCH, HEADS, PLAIN + VALUES)
    key = drawn(SEQ, BATCH, 1, TURNED)
    theirs = results(kernels.ApplyMLARotaryEmbQ.apply, kernels.ApplyMLARotaryEmbKV.apply, q, kv, key, cos, sin)
    ours = results(latent_rope.for_q, latent_rope.for_kv, q, kv, key, cos, sin)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other)
    print("equal")


def results(for_q: object, for_kv: object, *given: Tensor) -> list[Tensor]:
    """Query, key, value, and gradients of what they are made of."""
    q, kv, key = (each.clone().requires_grad_() for each in given[:3])
    cos, sin = given[3:]
    query = for_q(q.clone(), cos, sin, PLAIN, TURNED, None, 0, 1, False)  # type: ignore[operator]
    keys, values = for_kv(kv, key, cos, sin, TURNED, PLAIN, VALUES, None, 0, 1, False)  # type: ignore[operator]
    weights = torch.linspace(-1, 1, query.numel(), device=query.device).view_as(query)
    ((query + keys) * weights).sum().add(values.square().sum()).backward()
    gradients = [each.grad for each in (q, kv, key) if each.grad is not None]
    return [query.detach(), keys.detach(), values.detach(), *gradients]


check()
