"""Names of the ranges of a step, as they stand in traces.

| range | what |
|---|---|
| ``iteration N`` | as the log counts them |
| ``forward_backward``, ``reduce``, ``measure``, ``update`` | the functions of training/step.py, once a step |
| ``forward-compute``, ``backward-compute`` | Megatron's names: a microbatch's pass through a chunk |
| ``layer N`` | the forward pass of a layer, numbered as megatron-core does; none where layers are CUDA graphs |
| ``collective all_reduce`` ..., ``message send``, ``message recv`` | the call of a collective, or of a message |
| ``wait for all_reduce`` ..., ``wait for send`` ... | the host waits for its end; with NCCL, the stream does |
"""

import re

PHASES = ("forward_backward", "reduce", "measure", "update")
FORWARD, BACKWARD = "forward-compute", "backward-compute"
COLLECTIVE, MESSAGE, WAIT = "collective ", "message ", "wait for "
"""What names of ranges begin with."""
MESSAGES = ("send", "recv")
_ITERATION = re.compile(r"iteration (\d{1,18})")


def call_of(kind: str) -> str:
    """The range of a call, of a collective or of one of MESSAGES."""
    return (MESSAGE if kind in MESSAGES else COLLECTIVE) + kind


def is_collective(name: str) -> bool:
    """The call of a collective, or the wait for one."""
    return name.startswith(COLLECTIVE) or (name.startswith(WAIT) and name.removeprefix(WAIT) not in MESSAGES)


def iteration_name(number: int) -> str:
    """Of the range that is an iteration."""
    return f"iteration {number}"


def iteration_of(name: str) -> int | None:
    """The number, where it is the name of an iteration's range."""
    found = _ITERATION.fullmatch(name)
    return int(found[1]) if found else None
