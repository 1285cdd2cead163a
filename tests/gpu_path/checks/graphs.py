"""CUDA graphs: a replay computes on what lies in its inputs then; and what a capture does not allow is refused."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

LAYER = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.5)).cuda()


def stepped(x: Tensor) -> Tensor:
    """Output and gradient of a layer with dropout, side by side."""
    x = x.detach().requires_grad_()
    y = LAYER(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return torch.cat([y.detach(), gradient, torch.arange(8.0, device=x.device)[None]])


def forked(x: Tensor) -> Tensor:
    """On a second stream that waits for the first, and that the first waits for."""
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    y = x + 1
    side.wait_stream(here)
    with torch.cuda.stream(side):
        z = y * 3
    w = y - 1
    if sys.argv[1:] != ["unjoined"]:
        here.wait_stream(side)
    return torch.cat([w, z])


def captured(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph, and where it leaves its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(x)
    return graph, result


def replayed(function: Callable[[Tensor], Tensor]) -> None:
    """Three replays, of other inputs each, equal three calls, random numbers included."""
    static = torch.empty(4, 8, device="cuda")
    inputs = [torch.randn(4, 8, device="cuda") for _ in range(3)]
    graph, result = captured(function, static)
    torch.cuda.manual_seed(1)
    expected = [function(x) for x in inputs]
    torch.cuda.manual_seed(1)
    found = []
    for x in inputs:
        static.copy_(x)
        graph.replay()
        found.append(result.clone())
    torch.cuda.synchronize()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other), (function.__name__, one, other)
    assert not torch.equal(found[0], found[1])


def refused(function: Callable[[Tensor], object]) -> str:
    """Why a capture of it fails."""
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    try:
        captured(lambda x: (function(x), x)[1], x)
    except RuntimeError as error:
        first: BaseException = error
        while first.__context__:  # the end of an invalid capture fails, too
            first = first.__context__
        return str(first).splitlines()[0].removeprefix("CUDA error: ").split(" unless")[0]
    return "allowed"


replayed(stepped)
replayed(forked)
AN_EVENT = torch.cuda.Event()
AN_EVENT.record()
for function in (
    lambda x: x.sum().item(),
    lambda x: x.cpu(),
    lambda x: torch.ones(4).cuda(),
    lambda x: x[x > 0],
    lambda x: torch.cuda.synchronize(),
    lambda x: torch.cuda.current_stream().wait_event(AN_EVENT),
    lambda x: AN_EVENT.query(),
):
    print(refused(function))
