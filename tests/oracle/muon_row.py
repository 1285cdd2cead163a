"""A model on a layout: one step of Muon's, beside plain PyTorch's on the gradients and whole matrices that it had."""

from dataclasses import replace
from pathlib import Path

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
from tools.parity.layouts import with_layout
from training.config.run_config import RunConfig

RATE, DECAY = 0.01, 0.1
BOUND = 500 * 2.0**-24
"""Of an element, in the update's largest singular value: fp32's rounding, times what five iterations multiply a
direction by in which a gradient is nothing (the product of their first coefficients)."""


def muon_problems(config: RunConfig, prepared: Prepared, layout: str, folder: Path) -> list[str]:
    """What is off by more than ``BOUND``, in words."""
    optimizer = replace(
        config.optimizer, optimizer="muon", muon_fp32_matmul_prec="highest", lr=RATE, lr_decay_style="constant",
        lr_warmup_iters=0, weight_decay=DECAY, clip_grad=0.0,
    )  # fmt: skip
    changed, world_size = with_layout(replace(config, optimizer=optimizer), layout)
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
    expected = Muon(optimizer, case.shape).updated(step["weights"], step["gradients"], 1.0, Rates(RATE, DECAY, None))
    off = [words for name, matrix in expected.items() if (words := _off(name, step, matrix))]
    return off if expected else ["Muon has no matrix"]


def _off(name: str, step: dict[str, State], expected: Tensor) -> str:
    """Of experts, by the largest update of one."""
    update = torch.linalg.matrix_norm(expected - step["weights"][name] * (1 - RATE * DECAY), ord=2).max()
    found = (step["updated"][name] - expected).abs().max() / update
    return "" if found <= BOUND else f"an element of {name} is off by {found:.1e} of its update's spectral norm"
