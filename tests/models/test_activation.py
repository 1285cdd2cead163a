"""Activations with learned parameters."""

import torch

from models.layers.activation import XIELU, xielu
from ranks import run_ranks


def test_xielu_has_one_slope_around_zero() -> None:
    """beta on both sides: an element that is rounded across 0 changes no gradient."""
    run_ranks(1, _check_slopes)


def _check_slopes(_identity: object) -> None:
    x = torch.tensor([-1e-5, -9e-7, -1e-8, 1e-8, 9e-7, 1e-5], requires_grad=True)
    xielu(x, torch.zeros(1), torch.zeros(1), XIELU.BETA).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, XIELU.BETA), rtol=1e-4, atol=0)
