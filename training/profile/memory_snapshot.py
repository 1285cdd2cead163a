"""Snapshots of a GPU's memory: who allocated what is there, and what was allocated and freed before.

Files that https://pytorch.org/memory_viz shows; torch writes them with pickle, and nothing here reads them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from parallel.groups import Ranks
from training.config.small_sections import ProfileConfig
from training.memory.out_of_memory import is_out_of_memory

MOST_ENTRIES = 100_000
"""Allocations and frees that are kept, as Megatron does; a few hundred bytes each in the file."""


@contextlib.contextmanager
def memory_history(profile: ProfileConfig, run_dir: Path, ranks: Ranks) -> Iterator[None]:
    """With ``profile.record_memory_history``, record allocations; when memory runs out, write them.

    The snapshot is taken within the allocation that fails, before anything is freed. Costs two microseconds an
    allocation (torch's figure).
    """
    if not profile.record_memory_history:
        yield
        return
    if ranks.device.type == "cpu":
        ranks.say("profile.record_memory_history is off: it needs a GPU")
        yield
        return
    path = run_dir / "profile" / "out_of_memory" / file_name(ranks.rank)
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")
    # Cannot be detached, as long as the process lives. Of several failures, the first one's snapshot is kept.
    attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(lambda *_: None if path.exists() else write_snapshot(path))
    path.unlink(missing_ok=True)  # of an earlier start
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            with contextlib.suppress(Exception):  # whatever happens here must not hide the error itself
                if not path.exists():  # not torch's allocator has failed, but CUDA, NCCL or cuBLAS
                    write_snapshot(path)
                error.add_note(f"Every allocation of rank {ranks.rank} is in {path}: https://pytorch.org/memory_viz")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """What is allocated now, and what came before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


def file_name(rank: int) -> str:
    """Of a rank's snapshot."""
    return f"rank_{rank:05d}_memory.pickle"
