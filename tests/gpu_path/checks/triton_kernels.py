"""Triton kernels in their interpreter against what stands for them in trainings.

Megatron's rotary embedding of latent attention against te/latent_rope.py: values and gradients; Transformer Engine's
permutations, which are linear and each other's gradients, against te/permutation.py.
"""

import importlib.util
from types import ModuleType

import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as kernels
from torch import Tensor
from transformer_engine.pytorch.triton import permutation as replaced

from tests.gpu_path.te import latent_rope, permutation

SEQ, BATCH, HEADS, PLAIN, TURNED, VALUES = 3, 2, 2, 4, 8, 4


def check_rope() -> None:
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


def check_permutation() -> None:
    original = unreplaced()
    random = torch.Generator().manual_seed(2)
    tokens, experts, hidden = 5, 3, 8
    sent = (torch.rand(tokens, experts, generator=random) < 0.6).cuda()
    sent[0] = False
    inputs, weights = torch.randn(tokens, hidden, generator=random).cuda(), torch.rand(tokens, experts).cuda()
    count, offsets = int(sent.sum()), torch.tensor([0, 2, 3], device="cuda")
    for pad in (None, offsets):
        rows = count + (0 if pad is None else 4)
        found = []
        for module in (original, permutation):
            rows_of = module.make_row_id_map(sent, tokens, experts)
            out, _, probs = module.permute_with_mask_map(
                inputs, rows_of, weights, None, pad, tokens, experts, rows, hidden, 0
            )  # fmt: skip
            back, returned = module.unpermute_with_mask_map(
                out, rows_of, None, probs, pad, tokens, experts, hidden
            )  # fmt: skip
            found.append([out, probs, back, returned * sent])
        used = found[1][1] != 0  # the kernel leaves rows of padding as they are where there is none to clear
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(*((one, other) if one.shape[0] == tokens else (one[used], other[used])))
    sizes, order = torch.tensor([2, 0, 3], device="cuda"), torch.tensor([2, 0, 1], device="cuda")
    for forward in (True, False):
        moved = []
        for module in (original, permutation):
            rows_of = module.make_chunk_sort_map(sizes, order, tokens, 3)
            moved.append(
                module.sort_chunks_by_map(inputs, rows_of, weights[:, 0].contiguous(), tokens, hidden, forward)
            )
        for one, other in zip(*moved, strict=True):
            assert torch.equal(one, other)


def unreplaced() -> ModuleType:
    """Transformer Engine's module of the kernels as it is."""
    assert replaced.__spec__ and replaced.__spec__.origin
    found = importlib.util.spec_from_file_location("original_permutation", replaced.__spec__.origin)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


check_rope()
check_permutation()
print("equal")
