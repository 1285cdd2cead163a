"""Waits that no training shows missing, since today something else waits before: each alone, in late order.

Prints what was read. With an argument, torch's own wait of that kind does nothing.
"""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist

from data.loader import Prefetcher, Ring
from training.checkpoint.background.saver import HostCopy
from training.evaluation.asked import Asked


class Source:
    """Tokens that say which sample they are."""

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        return np.repeat(sample_indices[:, None].astype(np.int32), 9, axis=1)


class OneOfTwo:
    """As much of Ranks as Asked reads."""

    device = torch.device("cuda", 0)


def reader() -> list[int]:
    """Batches whose copies to the device have not run while the buffers are filled again."""
    batches = Prefetcher(Source(), iter(np.arange(16).reshape(16, 1)), 2, Ring(4))
    copies = [tokens.to("cuda", non_blocking=True) for tokens in batches]
    return [int(one[0, 0]) for one in copies]


def checkpoint() -> list[float]:
    """What a checkpoint's copy finds of an update that has not run."""
    weights, host = torch.zeros(4, device="cuda"), torch.zeros(4, pin_memory=True)
    torch.cuda.synchronize()
    weights.fill_(7)
    copy = HostCopy([(host.view(torch.uint8), weights.view(torch.uint8))])
    copy.start()
    copy.finish()
    return host.tolist()


def evaluation() -> list[bool]:
    """What a rank knows of another's request to stop, one call later."""
    asked = Asked(lambda: dist.get_rank() == 1, OneOfTwo())  # type: ignore[arg-type]
    return [asked(), asked.last()]


WAITS = {
    "reader": (reader, torch.cuda.Event, "synchronize"),
    "checkpoint": (checkpoint, torch.cuda.Stream, "wait_stream"),
    "evaluation": (evaluation, torch._C._distributed_c10d.Work, "wait"),
}
subject, *mutant = sys.argv[1:]
check, owner, wait = WAITS[subject]
if subject == "evaluation":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    OneOfTwo.device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl")
if mutant:
    setattr(owner, wait, lambda self, *args: True)
os.write(1, f"{check()}\n".encode())  # a line at once, beside the other rank's
os._exit(0)  # what was not waited for is left where it is
