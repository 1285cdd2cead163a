"""What one card, and the links between ranks on this node, really do. Needs torch; a GPU where there is one."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

REPEATS = 5


def products_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """TFLOPS of [size, size] x [size, size]: the best of some repetitions."""
    first, second = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_s(lambda: first @ second, device) / 1e12


def memory_gb_per_s(device: torch.device, elements: int) -> float:
    """GB/s of a copy, which reads and writes each byte."""
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_s(lambda: target.copy_(source), device) / 1e9


def gather_gb_per_s(device: torch.device, elements: int) -> float:
    """GB/s that an all-gather moves into a rank, over all ranks of the process group."""
    size = dist.get_world_size()
    local = torch.ones(elements // size, device=device)
    whole = torch.empty(local.numel() * size, device=device)
    seconds = best_s(lambda: dist.all_gather_into_tensor(whole, local), device)
    return whole.nbytes * (size - 1) / size / seconds / 1e9


def gather_latency_us(device: torch.device) -> float:
    """Microseconds of an all-gather of one number a rank."""
    local = torch.ones(1, device=device)
    whole = torch.empty(dist.get_world_size(), device=device)
    return best_s(lambda: dist.all_gather_into_tensor(whole, local), device) * 1e6


def best_s(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of some repetitions, after one that warms up."""
    found = []
    for _ in range(REPEATS + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def wait(device: torch.device) -> None:
    """Kernels run after the call that launched them has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
