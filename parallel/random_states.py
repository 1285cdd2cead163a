"""The states of Megatron's random-number tracker as bytes, also where CUDA graphs hold its generators."""

from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


def tracked_states() -> dict[str, Tensor]:
    """Name -> state, uint8 [n] on the host."""
    states = get_cuda_rng_tracker().get_states()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state.cpu() for name, state in states.items()
    }


def set_tracked_states(found: Mapping[str, Tensor]) -> None:
    """Inverse of ``tracked_states``. Generators stay the same objects: graphs that were captured draw from them."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, state in found.items():
        if isinstance(generator := states[name], torch.Generator):
            generator.set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)
