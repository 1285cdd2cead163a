"""Triton kernels in their interpreter against what stands for them in trainings.

Megatron's rotary embedding of latent attention against te/latent_rope.py: values and gradients; Transformer Engine's
permutations, which are linear and each other's gradients, against te/permutation.py, and its cross entropy against
te/cross_entropy.py.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from megatron.core.fusions import fused_mla_yarn_rope_apply as kernels
from torch import Tensor
from transformer_engine.common.triton import cross_entropy as entropy_replaced
from transformer_engine.pytorch.triton import permutation as replaced

from tests.gpu_path.te import cross_entropy, latent_rope, permutation

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
    original = unreplaced(replaced)
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


def check_cross_entropy() -> None:
    """Of one rank, and of two; one row has no label of any, and one is ignored."""
    original = unreplaced(entropy_replaced)
    random = torch.Generator().manual_seed(3)
    rows, columns = 6, 10
    logits = (3 * torch.randn(1, rows, 2 * columns, generator=random)).bfloat16().cuda()
    labels = torch.tensor([0, 3, 9, 10, 19, -100], device="cuda")
    grad = torch.randn(rows, generator=random).cuda()
    for world_size in (1, 2):
        parts = [part.contiguous() for part in logits.split(2 * columns // world_size, -1)]
        found = [
            _of_all_ranks(vars(original), parts, labels, grad),
            _of_all_ranks(cross_entropy.REPLACED, parts, labels, grad),
        ]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def _of_all_ranks(kernels: Mapping[str, Any], parts: Sequence[Tensor], labels: Tensor, grad: Tensor) -> list[Tensor]:
    """Losses, statistics and the gradients of each rank's logits."""
    rows, columns = len(labels), parts[0].shape[-1]
    losses, stats = torch.empty(rows).cuda(), torch.empty(rows, 2).cuda()
    saved = [torch.empty_like(part) for part in parts]
    common = {"Y_ptr": labels, "n_cols": columns, "ignore_idx": -100}
    read = {"n_rows_1": rows, "n_non_ignore": stats, "COUNT_NON_IGNORE": False, "COPY_INPUT": True, "BLOCK_SIZE": 16}
    gathered = torch.zeros(len(parts), rows, 4).cuda()
    for rank, (part, kept) in enumerate(zip(parts, saved, strict=True)):
        given = common | read | {f"X_stride_{dim}": part.stride(dim) for dim in range(3)}
        given |= {"X_ptr": part, "saved_input_ptr": kept}
        if len(parts) == 1:
            kernels["cross_entropy_forward_kernel"][(rows,)](
                **given, loss_ptr=losses, stats_ptr=stats, label_smoothing=0.0
            )
        else:
            kernels["cross_entropy_tp_pre_kernel"][(rows,)](
                **given, local_data_ptr=gathered[rank], rank=rank, COMPUTE_X_SUM=False
            )
    if len(parts) > 1:
        kernels["cross_entropy_tp_post_kernel"][(rows,)](
            **common, gathered_data_ptr=gathered, loss_ptr=losses, stats_ptr=stats, world_size=len(parts), n_rows=rows,
            label_smoothing=0.0,
        )  # fmt: skip
    for rank, kept in enumerate(saved):
        kernels["cross_entropy_backward_kernel"][(rows,)](
            **common, saved_input_ptr=kept, stats_ptr=stats, n_non_ignore_ptr=stats, grad_output_ptr=grad,
            grad_output_stride=1, rank=rank, world_size=len(parts), reduce_loss=False, label_smoothing=0.0,
            BLOCK_SIZE=16,
        )  # fmt: skip
    return [losses, stats, *saved]


def unreplaced(module: ModuleType) -> ModuleType:
    """A module of Transformer Engine's kernels as it is."""
    assert module.__spec__ and module.__spec__.origin
    found = importlib.util.spec_from_file_location("original_" + module.__name__.split(".")[-1], module.__spec__.origin)
    assert found and found.loader
    original = importlib.util.module_from_spec(found)
    found.loader.exec_module(original)
    return original


check_rope()
check_permutation()
check_cross_entropy()
print("equal")
