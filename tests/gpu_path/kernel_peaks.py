"""A hook, behind Transformer Engine's (te/extension.py): the allocator's peak does not count what emulated kernels
compute with.

A product of the emulated extension casts its inputs to fp32 tensors of their own, and attention writes all scores down;
a card's kernels have neither. In toy sizes that is as much as a layer keeps. What a kernel returns counts, once it has
ended. What Megatron fuses by torch.compile is one kernel, too.
"""

import functools
from collections.abc import Callable

import torch

from tests.gpu_path import jit_fused
from tests.gpu_path.te import cross_entropy, kernels, latent_rope, permutation


class Peak:
    """Of what is allocated while no emulated kernel runs."""

    def __init__(self) -> None:
        self.highest, self.within = 0, False
        self.of_torch, self.reset_of_torch = torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats

    def aside[**P, R](self, function: Callable[P, R]) -> Callable[P, R]:
        """A kernel whose own tensors do not count."""

        @functools.wraps(function)
        def kernel(*args: P.args, **kwargs: P.kwargs) -> R:
            if self.within or not torch.cuda.is_initialized():
                return function(*args, **kwargs)
            self.highest, self.within = self.read(), True
            try:
                return function(*args, **kwargs)
            finally:
                self.within = False
                self.reset_of_torch()

        return kernel

    def read(self, device: object = None) -> int:
        """In place of torch.cuda.max_memory_allocated; a process has one device."""
        return max(self.highest, self.of_torch())

    def reset(self, device: object = None) -> None:
        """In place of torch.cuda.reset_peak_memory_stats."""
        self.highest = 0
        self.reset_of_torch()


def install(peak: Peak) -> None:
    """Before Transformer Engine and Megatron are imported."""
    torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats = peak.read, peak.reset
    register = kernels.kernel
    kernels.kernel = lambda function: register(peak.aside(function))
    for one in cross_entropy.REPLACED.values():
        one.function = peak.aside(one.function)
    permutation.REPLACED = tuple(map(peak.aside, permutation.REPLACED))
    for name in ("for_q", "for_kv"):
        setattr(latent_rope, name, peak.aside(getattr(latent_rope, name)))
    jit_fused.measured.append(peak.aside)


install(Peak())
