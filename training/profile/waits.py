"""Where this rank calls collectives and waits for them: torch.distributed's process groups, watched for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup, Work

from training.profile.range_names import MESSAGES, WAIT, call_of

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
"""Method of a process group -> the collective's name in torch.distributed."""
END_OF_GROUP = "_end_coalescing"
"""Of several calls, of which the last one gives its name."""


@contextlib.contextmanager
def record_waits(push: Callable[[str], None], pop: Callable[[], None]) -> Iterator[None]:
    """Within, a collective or message is a range twice: its call, and the wait for its end (``Work.wait``).

    On a CPU the rank stands still in the second. On a GPU the host does not: a collective that runs on the stream that
    it was called on (``async_op=False``) is what lies between two CUDA events around the call, and one on a stream of
    its own holds the compute stream up between events around the wait.
    """
    works: WeakKeyDictionary[Work, str] = WeakKeyDictionary()  # weak: a work may hold its tensors' memory
    newest = ""

    def calling(method: Any, kind: str) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            nonlocal newest
            if group.size() == 1:  # nothing to wait for
                return method.__get__(group)(*args, **kwargs)
            newest = kind or newest
            push(call_of(newest))
            try:
                work = method.__get__(group)(*args, **kwargs)
            finally:
                pop()
            if work is not None:
                works[work] = newest
            return work

        return call

    wait = vars(Work)["wait"]  # as it lies in the class: a method of pybind11 would come back unbound

    def waiting(work: Work, *args: Any, **kwargs: Any) -> Any:
        push(WAIT + works.pop(work, "?"))
        try:
            return wait.__get__(work)(*args, **kwargs)
        finally:
            pop()

    kinds = {**COLLECTIVES, **{method: method for method in MESSAGES}, END_OF_GROUP: ""}
    before = {method: function for method, function in vars(ProcessGroup).items() if method in kinds}
    try:
        for method, function in before.items():
            setattr(ProcessGroup, method, calling(function, kinds[method]))
        Work.wait = waiting  # type: ignore[assignment, method-assign]
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]
        for method, function in before.items():
            setattr(ProcessGroup, method, function)
