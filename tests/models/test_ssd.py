"""The chunked state space model against its recurrence, token by token, in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.layers.ssd import causal_conv, chunked_scan
from ranks import run_ranks

SAMPLES, LENGTH, HEADS, CHANNELS, GROUPS, STATES = 2, 75, 6, 5, 3, 7
STARTS = torch.tensor([[0] * 1 + [1] * 30 + [31] * 44, [0] * 16 + [16] * 4 + [20] * 55])
"""Of each token its document: of 1 to 55 tokens; one begins with a chunk of 16, others within, several lie in one."""


def on_a_rank(check: Callable[..., None], *args: object) -> None:
    """In a process of its own: this one is forked from, and computes nothing."""
    run_ranks(1, lambda _identity: check(*args))


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    sizes = {"x": (HEADS, CHANNELS), "b": (GROUPS, STATES), "c": (GROUPS, STATES)}
    found = {name: torch.randn(SAMPLES, LENGTH, *size, generator=draw) for name, size in sizes.items()}
    found["dt"] = torch.rand(SAMPLES, LENGTH, HEADS, generator=draw)
    found["a"] = -3 * torch.rand(HEADS, generator=draw)
    return found


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None = None) -> Tensor:
    """S_t = exp(dt_t a) S_{t-1} + dt_t x_t B_t, y_t = C_t S_t; the state is 0 where a document starts."""
    x, dt, a, b, c = (one.double() for one in (x, dt, a, b, c))
    b, c = (one.repeat_interleave(HEADS // GROUPS, dim=2) for one in (b, c))
    state, found = x.new_zeros(SAMPLES, HEADS, CHANNELS, STATES), []
    for token in range(x.shape[1]):
        if starts is not None:
            state = state * (starts[:, token] != token)[:, None, None, None]
        added = (dt[:, token, :, None] * x[:, token])[..., None] * b[:, token, :, None]
        state = state * (dt[:, token] * a).exp()[..., None, None] + added
        found.append((state * c[:, token, :, None]).sum(dim=-1))
    return torch.stack(found, dim=1)


def _same_as_the_recurrence(chunk: int, starts: Tensor | None) -> None:
    given = inputs()
    found = chunked_scan(**given, documents=starts, chunk=chunk)
    torch.testing.assert_close(found.double(), recurrence(**given, starts=starts), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one document", "documents"])
@pytest.mark.parametrize("chunk", [1, 10, 16, 128])
def test_chunks_give_what_the_recurrence_gives(chunk: int, starts: Tensor | None) -> None:
    on_a_rank(_same_as_the_recurrence, chunk, starts)


def _same_gradients() -> None:
    """A decay of e^-900 within a chunk: what is masked must not become Inf before it is masked."""
    given = {name: value.requires_grad_() for name, value in inputs().items()}
    strong = {**given, "dt": given["dt"] * 20}
    leaves = list(given.values())
    ours = torch.autograd.grad(chunked_scan(**strong, documents=STARTS, chunk=16).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad(recurrence(**strong, starts=STARTS).sum(), leaves)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-2)


def test_gradients_are_finite_and_those_of_the_recurrence() -> None:
    on_a_rank(_same_gradients)


def _same_convolution() -> None:
    draw = torch.Generator().manual_seed(2)
    given, weight, bias = (torch.randn(size, generator=draw) for size in ((SAMPLES, LENGTH, 9), (9, 1, 4), (9,)))

    def torchs(part: Tensor) -> Tensor:
        out = torch.nn.functional.conv1d(part.transpose(1, 2), weight, bias, padding=3, groups=9)
        return torch.nn.functional.silu(out[..., : part.shape[1]].transpose(1, 2))

    torch.testing.assert_close(causal_conv(given, weight, bias), torchs(given))
    together = causal_conv(given, weight, bias, documents=STARTS)
    for sample in range(SAMPLES):
        for start in STARTS[sample].unique().tolist():
            own = STARTS[sample] == start
            torch.testing.assert_close(together[sample : sample + 1, own], torchs(given[sample : sample + 1, own]))


def test_the_convolution_is_torchs_and_stays_within_a_document() -> None:
    on_a_rank(_same_convolution)
