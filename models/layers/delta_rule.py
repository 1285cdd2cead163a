"""The gated delta rule in plain torch, in chunks: arXiv:2412.06464, section 3.3, with the WY form of arXiv:2406.06484.

In fp32, as flash-linear-attention's kernels, which do the same several times faster (models/layers/gated_delta_net.py
chooses).

Shape letters: b samples, s tokens, c chunks, l and m tokens of a chunk (Q), h heads, k channels of a key, v of a value.
"""

import torch
from torch import Tensor

from models.costs.flops import DELTA_CHUNK
from models.layers.ssd import chunks


def normalised(x: Tensor) -> Tensor:
    """Over the last dim to length 1, as flash-linear-attention's l2norm."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
                     documents: Tensor | None = None, chunk: int = DELTA_CHUNK) -> Tensor:  # fmt: skip
    """o_t = q_t S_t / sqrt(k), S_t = S' + beta_t k_t (v_t - k_t S')^T with S' = exp(decay_t) S_{t-1}: [b, s, h, v],
    fp32.

    query, key [b, s, h, k] of length 1, value [b, s, h, v], decay below 0 and beta in (0, 1) [b, s, h]. documents:
    [b, s], equal numbers for tokens of one document; the state is 0 before each.
    """
    samples, length, heads, width = key.shape
    size = min(chunk, length)
    query, key, value, beta = (_by_head(one.float(), size) for one in (query, key, value, beta))
    query, written = query * width**-0.5, key * beta[..., None]
    decay = _by_head(decay.double(), size).cumsum(dim=-1)  # in fp64: its gradient is a sum of terms that nearly cancel
    earlier = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    spans = decay, decay[..., -1:] - decay, decay[..., -1]
    reached, left, kept = (span.float().exp() for span in spans)
    if documents is not None:
        whole = _by_head(documents[..., None], size, repeat_last=True)  # [b, 1, c, l]
        last = whole[..., -1:]
        entered = torch.cat([whole[:, :, :1, :1], last[:, :, :-1]], dim=2)  # the document of the state before the chunk
        earlier = earlier & (whole[..., None] == whole[..., None, :])
        reached, left = reached * (whole == entered), left * (whole == last)
        kept = kept * (last == entered)[..., 0]
    within = (decay[..., None] - decay[..., None, :]).float().masked_fill(~earlier, -torch.inf).exp()
    system = (written @ key.transpose(-1, -2)) * within  # whose diagonal the solver takes to be 1
    right = torch.cat([value * beta[..., None], written * reached[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], width], dim=-1)
    attention = (query @ key.transpose(-1, -2)) * within
    query, key = query * reached[..., None], key * left[..., None]
    state = value.new_zeros(samples, heads, width, value.shape[-1])
    found = []
    for number in range(key.shape[2]):
        added = new[:, :, number] - old[:, :, number] @ state
        found.append(query[:, :, number] @ state + attention[:, :, number] @ added)
        state = state * kept[:, :, number, None, None] + key[:, :, number].transpose(-1, -2) @ added
    return torch.cat(found, dim=2)[:, :, :length].transpose(1, 2)


def _by_head(whole: Tensor, size: int, *, repeat_last: bool = False) -> Tensor:
    """[b, s, h, ...] -> [b, h, c, Q, ...]."""
    return chunks(whole, size, repeat_last=repeat_last).movedim(3, 1)
