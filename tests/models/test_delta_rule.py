"""The chunked gated delta rule against its recurrence, token by token, in fp64."""

import pytest
import torch
from torch import Tensor

from models.layers.delta_rule import gated_delta_rule, normalised
from ranks import run_ranks
from tests.models.test_ssd import LENGTH, SAMPLES, STARTS

HEADS, KEYS, VALUES = 3, 6, 5


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    keys, values = ((SAMPLES, LENGTH, HEADS, width) for width in (KEYS, VALUES))
    return {
        "query": normalised(torch.randn(keys, generator=draw)),
        "key": normalised(torch.randn(keys, generator=draw)),
        "value": torch.randn(values, generator=draw),
        "decay": -2 * torch.rand(keys[:-1], generator=draw),
        "beta": torch.rand(keys[:-1], generator=draw),
    }


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None = None
) -> Tensor:
    """S' = exp(decay_t) S_{t-1}, S_t = S' + beta_t k_t (v_t - k_t S')^T, o_t = q_t S_t / sqrt(k)."""
    query, key, value, decay, beta = (one.double() for one in (query, key, value, decay, beta))
    state, found = key.new_zeros(SAMPLES, HEADS, KEYS, VALUES), []
    for token in range(key.shape[1]):
        if starts is not None:
            state = state * (starts[:, token] != token)[:, None, None, None]
        state = state * decay[:, token].exp()[..., None, None]
        known = torch.einsum("bhk,bhkv->bhv", key[:, token], state)
        added = (value[:, token] - known) * beta[:, token, :, None]
        state = state + key[:, token, :, :, None] * added[:, :, None]
        found.append(torch.einsum("bhk,bhkv->bhv", query[:, token], state) * KEYS**-0.5)
    return torch.stack(found, dim=1)


def _same(chunk: int, starts: Tensor | None) -> None:
    given = {name: value.requires_grad_() for name, value in inputs().items()}
    found = gated_delta_rule(**given, documents=starts, chunk=chunk)
    expected = recurrence(**given, starts=starts)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    leaves = list(given.values())
    ours, theirs = (torch.autograd.grad(one.sum(), leaves) for one in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one document", "documents"])
@pytest.mark.parametrize("chunk", [1, 10, 16, 64])
def test_chunks_give_what_the_recurrence_gives(chunk: int, starts: Tensor | None) -> None:
    run_ranks(1, lambda _identity: _same(chunk, starts))
