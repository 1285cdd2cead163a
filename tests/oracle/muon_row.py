"""A model on a layout with Muon: one step beside plain PyTorch's, on the gradients and whole matrices that it had; and
20 iterations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.prepared import Prepared
from parallel.launch import Identity
from parallel.local_ranks import fork_ranks
from tests.oracle.case import Case
from tests.oracle.exported import State, assembled
from tests.oracle.muon import Muon
from tests.oracle.sizes import Rates
from tests.oracle.trained import train_case
from tools.parity.compare import Observed, observe
from tools.parity.layouts import with_layout
from training.config.run_config import RunConfig

RATE, DECAY = 0.01, 0.1
BOUND = 500 * 2.0**-24
"""Of an element, in the update's largest singular value: fp32's rounding, times what five iterations multiply a
direction by in which a gradient is nothing (the product of their first coefficients)."""
ITERATIONS, SLOW_RATE, LOSS_BOUND = 20, 2e-3, 1e-5
"""At five times that rate rounding grew to 6e-2 of the loss in gated delta nets, and to 9e-5 in 36 other rows."""


def muon_problems(config: RunConfig, prepared: Prepared, layout: str, folder: Path) -> list[str]:
    """What is off by more than ``BOUND`` after a step, in words."""
    changed, world_size = with_layout(with_muon(config, lr=RATE, weight_decay=DECAY, clip_grad=0.0), layout)
    assert not changed.problems(world_size)
    case = Case(seed=0, config=changed, world_size=world_size, layout=layout, ends=0.0, words="", steps=1)

    def rank(identity: Identity) -> int:
        train_case(identity, case, prepared, folder)
        return 0

    _, failure = fork_ranks(world_size, rank)
    if failure is not None:
        return [failure.text]
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False)[0] for rank in range(world_size)]
    step = {
        name: assembled([part for rank in ranks for part in rank[name]]) for name in ("weights", "gradients", "updated")
    }
    plain = Muon(changed.optimizer, case.shape)
    expected = plain.updated(step["weights"], step["gradients"], 1.0, Rates(RATE, DECAY, None))
    off = [words for name, matrix in expected.items() if (words := _off(name, step, matrix))]
    return off if expected else ["Muon has no matrix"]


def with_muon(config: RunConfig, **settings: Any) -> RunConfig:
    """Whose products are fp32's, at one rate."""
    fields = {"muon_fp32_matmul_prec": "highest", "lr_decay_style": "constant", "lr_warmup_iters": 0, **settings}
    return replace(config, optimizer=replace(config.optimizer, optimizer="muon", **fields))


def observed(config: RunConfig, prepared: Prepared, layout: str, folder: Path) -> Observed:
    """``ITERATIONS`` with Muon."""
    changed = with_muon(config, lr=SLOW_RATE)
    changed = replace(changed, train=replace(changed.train, train_iters=ITERATIONS))
    return observe(changed, prepared, layout, folder, until=ITERATIONS, gradients=False)


def _off(name: str, step: dict[str, State], expected: Tensor) -> str:
    """Of experts, by the largest update of one."""
    update = torch.linalg.matrix_norm(expected - step["weights"][name] * (1 - RATE * DECAY), ord=2).max()
    found = (step["updated"][name] - expected).abs().max() / update
    return "" if found <= BOUND else f"an element of {name} is off by {found:.1e} of its update's spectral norm"
