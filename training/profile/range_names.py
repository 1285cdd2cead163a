"""Names of the ranges of a step, as they stand in traces.

| range | what |
|---|---|
| ``iteration N`` | as the log counts them |
| ``forward_backward``, ``reduce``, ``measure``, ``update`` | the functions of training/step.py, once a step |
| ``forward-compute``, ``backward-compute`` | Megatron's names: a microbatch's pass through a chunk |
| ``layer N`` | the forward pass of a layer, numbered as megatron-core does |
| ``collective all_reduce`` ... | the call of a collective, and the wait for its end |
| ``message send``, ``message recv`` | the same of messages between stages |
"""

import re
from typing import Protocol

PHASES = ("forward_backward", "reduce", "measure", "update")
FORWARD, BACKWARD = "forward-compute", "backward-compute"
COLLECTIVE, MESSAGE = "collective ", "message "
"""What names of ranges begin with."""
_ITERATION = re.compile(r"iteration (\d{1,18})")


class Named(Protocol):
    """An event of a trace."""

    @property
    def name(self) -> str: ...


def iteration_name(number: int) -> str:
    """Of the range that is an iteration."""
    return f"iteration {number}"


def iteration_of(event: Named) -> int | None:
    """The number, where the event is the range of an iteration."""
    found = _ITERATION.fullmatch(event.name)
    return int(found[1]) if found else None
