"""xIELU's own backward pass: autograd's gradients, with less kept for it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.layers.activation import XIELU
from ranks import run_ranks


def plain(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """arXiv:2411.13010, equation 12, by autograd."""
    above, below = functional.softplus(alpha_p), 0.5 + functional.softplus(alpha_n)
    return torch.where(x > 0, above * x**2 + 0.5 * x, (torch.expm1(x.clamp(max=0)) - x) * below + 0.5 * x)


def _same_gradients(_: Any) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    module: Any = XIELU(SimpleNamespace(params_dtype=torch.float64), torch.distributed.group.WORLD)  # type: ignore[arg-type]
    with torch.no_grad():
        module.alpha_p.fill_(0.7)
        module.alpha_n.fill_(-0.3)
    x = torch.randn(7, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.view(-1)[:4] = torch.tensor([0.0, -5e-7, 5e-7, 1e4])  # no jump at 0, and no overflow above
    x.requires_grad_()
    inputs, up = (x, module.alpha_p, module.alpha_n), torch.randn_like(x)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.numel()), one)[1], lambda one: one):
        out = module(x)
    expected = plain(*inputs)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out, inputs, up)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, up))
    torch.testing.assert_close(found[0].flatten()[:3], (0.5 * up).flatten()[:3], rtol=1e-5, atol=0)
    assert [one for one in kept if one > 1] == [x.numel()]


def test_the_backward_pass_is_autograds_and_keeps_the_input_alone() -> None:
    run_ranks(1, _same_gradients)
