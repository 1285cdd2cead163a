"""What kind of work a kernel does, by its name, and how long a GPU spends on each kind in a trace."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from training.profile.chrome_trace import KERNELS, TraceEvent
from training.profile.intervals import Interval, length, union, within, without

KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("communication", re.compile(r"^nccl|userbuffers")),
    ("copies", re.compile(r"^mem(cpy|set)\b")),
    ("attention", re.compile(r"fmha|flash|sdpa|attention|attn")),  # before products: cuDNN's has "wgmma" in its name
    ("optimizer", re.compile(r"adam|multi_tensor|multitensor|l2norm|foreach")),
    ("loss and embedding", re.compile(r"cross_entropy|softmax|embedding|indexselect|index_select|indexing_backward")),
    (
        "quantisation",
        re.compile(r"cast_transpose|quantiz|amax|fp8_(?:cast|transpose)|compute_scale|cast_fp8|cast_kernel"),
    ),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|xmma|wgmma|gemv|splitk|cublas")),
)
"""The first that fits, in lower case. What fits none is elementwise: norms, activations, rotary embeddings, sums."""
OTHERS = "norms and elementwise"
IDLE = "idle"


def kind_of(event: TraceEvent) -> str:
    """Of a kernel, or a copy."""
    if event.category != "kernel":
        return "copies"
    name = event.name.lower()
    return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHERS)


def shares(events: Sequence[TraceEvent], window: Interval) -> dict[str, float]:
    """Seconds of the window by kind, most first; IDLE: nothing runs. Of kinds at the same time the first in KINDS
    counts last: communication behind computation is not communication's time. All add up to the window."""
    spans = defaultdict[str, list[Interval]](list)
    for event in events:
        if event.category in KERNELS:
            spans[kind_of(event)].append((event.begin_s, event.end_s))
    found, busy = dict[str, float](), list[Interval]()
    for kind in (OTHERS, *(kind for kind, _ in KINDS[::-1])):
        own = without(within(union(spans[kind]), window), busy)
        if own:
            found[kind], busy = length(own), union([*busy, *own])
    found[IDLE] = window[1] - window[0] - length(busy)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def gaps(events: Iterable[TraceEvent], window: Interval) -> dict[str, float]:
    """In which the GPU has nothing to do: how many, how long together, and the longest. Seconds."""
    busy = within(union((event.begin_s, event.end_s) for event in events if event.category in KERNELS), window)
    idle = without([window], busy)
    return {"count": len(idle), "total_s": length(idle), "longest_s": max((e - b for b, e in idle), default=0.0)}
