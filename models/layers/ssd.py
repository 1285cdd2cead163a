"""Mamba-2's state space model in plain torch, the chunked algorithm of arXiv:2405.21060, section 6; its convolution.

Within a chunk of Q tokens the recurrence is a product of matrices, as attention with a decay for a mask; a state is
carried from chunk to chunk. Everything behind the projections is in fp32, as in mamba_ssm's kernels, which do the same
several times faster (models/layers/mamba.py chooses).

Shape letters: b samples, s tokens, c chunks, l and m tokens of a chunk (Q), g groups, r heads of a group, h = g r
heads, p channels of a head, n channels of a state.
"""

import torch
from torch import Tensor
from torch.nn import functional

from models.costs.flops import MAMBA_CHUNK


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None = None) -> Tensor:
    """Each channel's own causal convolution, then SiLU. inputs [b, s, channels], weight [channels, 1, taps] -> inputs'.

    documents: [b, s], equal numbers for tokens of one document; a tap does not reach into another one.
    """
    taps, length = weight.shape[-1], inputs.shape[1]
    padded = functional.pad(inputs, (0, 0, taps - 1, 0))
    out = inputs.new_zeros(()) if bias is None else bias
    for tap in range(taps):
        term = padded[:, tap : tap + length] * weight[:, 0, tap]
        back = taps - 1 - tap
        if documents is not None and back:
            same = functional.pad(documents[:, back:] == documents[:, :-back], (back, 0))[:, :length]
            term = term * same[..., None]
        out = out + term
    return functional.silu(out)


def chunked_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor | None = None,
                 chunk: int = MAMBA_CHUNK) -> Tensor:  # fmt: skip
    """y_t = C_t S_t with S_t = exp(dt_t a) S_{t-1} + dt_t x_t B_t: y [b, s, h, p], fp32.

    x [b, s, h, p], dt [b, s, h] above 0, a [h] below 0, b and c [b, s, g, n]. documents: [b, s], equal numbers for
    tokens of one document; the state is 0 before each.
    """
    length, groups = x.shape[1], b.shape[2]
    size = min(chunk, length)
    x, b, c = (chunks(one.float(), size) for one in (x, b, c))
    dt = chunks(dt, size)
    x = (x * dt.float()[..., None]).unflatten(3, (groups, -1))  # [b, c, l, g, r, p]
    # its logarithm since the chunk began; in fp64, for its gradient is a sum of terms that nearly cancel
    decay = torch.cumsum(dt.double() * a.double(), dim=2).unflatten(3, (groups, -1))
    alike = None if documents is None else chunks(documents, size, repeat_last=True)
    y = _within_chunks(x, decay, b, c, alike) + _across_chunks(x, decay, b, c, alike)
    return y.flatten(3, 4).flatten(1, 2)[:, :length]


def chunks(whole: Tensor, size: int, *, repeat_last: bool = False) -> Tensor:
    """[b, s, ...] -> [b, c, Q, ...]. Zeros behind the end: a token with dt 0 neither decays a state nor adds to it."""
    missing = -whole.shape[1] % size
    if missing and repeat_last:
        whole = torch.cat([whole, whole[:, -1:].expand(-1, missing, *whole.shape[2:])], dim=1)
    elif missing:
        whole = functional.pad(whole, (0, 0) * (whole.dim() - 2) + (0, missing))
    return whole.unflatten(1, (-1, size))


def _within_chunks(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> Tensor:
    """What the tokens of a chunk give one another: (C B^T, masked and decayed) x, [b, c, l, g, r, p]."""
    size = x.shape[2]
    seen = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()[:, :, None, None]
    if documents is not None:
        seen = seen & (documents[:, :, :, None] == documents[:, :, None, :])[..., None, None]
    since = decay[:, :, :, None] - decay[:, :, None]  # [b, c, l, m, g, r]
    mask = since.float().masked_fill(~seen, -torch.inf).exp()
    scores = torch.einsum("bclgn,bcmgn->bclmg", c, b)
    return torch.einsum("bclmgr,bcmgrp->bclgrp", scores[..., None] * mask, x)


def _across_chunks(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, documents: Tensor | None) -> Tensor:
    """What the tokens get of the chunks before theirs, [b, c, l, g, r, p]."""
    left = (decay[:, :, -1:] - decay).float().exp()  # of what a token adds, at the end of its chunk
    kept, reached = decay[:, :, -1].float().exp(), decay.float().exp()  # of the state before it: at the end; at a token
    if documents is not None:
        last = documents[:, :, -1]
        entered = torch.cat([documents[:, :1, 0], last[:, :-1]], dim=1)  # the document of the state before the chunk
        left = left * (documents == last[..., None])[..., None, None]
        kept = kept * (last == entered)[..., None, None]
        reached = reached * (documents == entered[..., None])[..., None, None]
    added = torch.einsum("bclgrp,bclgn->bcgrpn", x * left[..., None], b)
    state, states = torch.zeros_like(added[:, 0]), []
    for number in range(x.shape[1]):
        states.append(state)
        state = state * kept[:, number, ..., None, None] + added[:, number]
    found = torch.einsum("bclgn,bcgrpn->bclgrp", c, torch.stack(states, dim=1))
    return found * reached[..., None]
