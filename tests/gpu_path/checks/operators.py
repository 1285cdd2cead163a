"""Forward, backward, optimizer, random numbers and indexing: on "cuda" as on the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

torch.manual_seed(3)
X, W = torch.randn(8, 16), torch.randn(16, 16)


def trained(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Loss, gradients and weights after a forward, a backward and two steps of AdamW."""
    x, w = (t.to(device, dtype).detach().requires_grad_() for t in (X, W))
    heads = (x @ w).view(1, 1, 8, 16)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    y = torch.nn.functional.gelu(attended).view(8, 16)
    loss = torch.nn.functional.cross_entropy(y, torch.arange(8, device=device))
    rows = torch.nn.functional.embedding(torch.tensor([1, 2, 1], device=device), w)
    norm = torch.nn.functional.rms_norm(y, (16,), w[0])
    loss = loss + rows.float().pow(2).sum().sqrt() + y[y > 0].sum() + y.topk(3).values.sum() + y.sort(0).values[2].sum()
    loss = loss + norm.float().square().mean()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    parameter = torch.nn.Parameter(w.detach().clone())
    parameter.grad = w.grad.clone()
    adam = torch.optim.AdamW([parameter], lr=0.1, fused=device == "cuda")
    adam.step()
    adam.step()
    return [t.detach().float().cpu() for t in (loss, x.grad, w.grad, parameter)]


def equal(name: str, run: Callable[[str], Tensor]) -> None:
    cpu, cuda = run("cpu"), run("cuda").cpu()
    assert torch.equal(cpu, cuda), (name, cpu, cuda)


for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
    for cpu, cuda in zip(trained("cpu", dtype), trained("cuda", dtype), strict=True):
        worst = ((cpu - cuda).abs().max() / cpu.abs().max()).item()
        assert worst < bound, (dtype, worst)

equal("nonzero", lambda device: torch.nonzero(X.to(device) > 0))
equal("masked_select", lambda device: X.to(device)[X.to(device) > 0])
equal("unique", lambda device: torch.unique(X.to(device).round()))
equal("cumsum", lambda device: X.to(device).cumsum(0))
equal(
    "scatter",
    lambda device: torch.zeros(3, device=device).index_add(0, torch.tensor([0, 2], device=device), X[0, :2].to(device)),
)
equal("out=", lambda device: torch.add(X.to(device), 1, out=torch.empty(0, device=device)))
equal("foreach", lambda device: torch.stack(torch._foreach_norm([X.to(device), W.to(device)])))
equal("view of a view", lambda device: X.to(device)[2:, ::2].transpose(0, 1).contiguous())

# A generator's state decides what is drawn: saved and restored, the same numbers come again.
state = torch.cuda.get_rng_state()
first = torch.rand(10, device="cuda")
assert not torch.equal(first, torch.rand(10, device="cuda"))
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(10, device="cuda"))
kept = torch.nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
assert 400 < (kept == 2).sum().item() < 600

# New memory holds NaN, so that what is read before it is written shows.
assert torch.empty(1 << 20, device="cuda").isnan().all()
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    raise AssertionError("80 GiB hold 1 TiB")
except torch.OutOfMemoryError as error:
    assert "out of memory" in str(error), error
