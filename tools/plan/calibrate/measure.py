"""What one card really does: matrix products, and a copy. Needs torch; a GPU where there is one."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

REPEATS = 7
SQUARES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (128, 256, 512, 1024)}
SHORT = {"cuda": (256, 512, 1024, 2048), "cpu": (16, 32, 64, 128, 256)}
"""Of the one dim that is not ``WIDE``, the first or the inner one."""
WIDE = {"cuda": 8192, "cpu": 512}
BLOCK = {"cuda": (8192, 14336, 4096), "cpu": (512, 1376, 512)}
"""Tokens, MLP and hidden width of a model's first MLP product (cuda: Llama 3 8B)."""
QUEUED, SMALL = 256, 64
"""Launches that are timed together (CUDA queues about a thousand), and width of what they compute."""
COPIED = {"cuda": 2**28, "cpu": 2**24}
"""Elements of fp32; far more than caches hold."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Product:
    """[m, k] x [k, n] in one number format."""

    dtype: str
    m: int
    n: int
    k: int
    tflops: float


def shapes(kind: str) -> list[tuple[int, int, int]]:
    """m, n, k that are measured on a "cuda" or "cpu" device."""
    wide = WIDE[kind]
    found = [(size, size, size) for size in SQUARES[kind]]
    found += [(short, wide, wide) for short in SHORT[kind]] + [(wide, wide, short) for short in SHORT[kind]]
    return [*found, BLOCK[kind]]


def products(device: torch.device, formats: dict[str, torch.dtype]) -> list[Product]:
    """Of every format and shape."""
    found = []
    for name, dtype in formats.items():
        for m, n, k in shapes(device.type):
            first = torch.randn(m, k, device=device).to(dtype)
            second = torch.randn(n, k, device=device).to(dtype)  # as torch.nn.Linear keeps its weight
            seconds = middle_s(lambda first=first, second=second: first @ second.t(), device)  # type: ignore[misc]
            found.append(Product(dtype=name, m=m, n=n, k=k, tflops=2 * m * n * k / seconds / 1e12))
    return found


def memory_gb_per_s(device: torch.device) -> float:
    """GB/s of a copy, which reads and writes each byte."""
    source = torch.ones(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / middle_s(lambda: target.copy_(source), device) / 1e9


def launch_us(work: Callable[[], Any], device: torch.device) -> float:
    """Of the host, for one call that it does not wait for; as many as a stream's queue takes without filling up."""
    return middle_s(work, device, QUEUED) / QUEUED * 1e6


def linear(device: torch.device) -> Callable[[], Any]:
    """A module's forward pass that is one small kernel, as autograd records it."""
    module = torch.nn.Linear(SMALL, SMALL, bias=False, device=device)
    inputs = torch.ones(SMALL, SMALL, device=device)
    return lambda: module(inputs)


def middle_s(work: Callable[[], Any], device: torch.device, queued: int = 0) -> float:
    """Seconds of the median of some repetitions, after one that warms up: what a long run sees of it. queued: each of
    so many calls, whose end is not waited for."""
    found = []
    for _ in range(REPEATS + 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(queued or 1):
            work()
        if not queued:
            wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def wait(device: torch.device) -> None:
    """Kernels run after the call that launched them has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
