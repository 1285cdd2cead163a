"""What a rank asks of the store (one server, on rank 0's node) while the groups are built."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel import groups
from parallel.launch import Identity
from parallel.layout import Layout
from ranks import run_ranks


class CountingStore(dist.Store):
    """Counts what goes through to another store."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.counts = inner, Counter[str]()

    @property
    def timeout(self) -> Any:
        return self.inner.timeout

    def set_timeout(self, timeout: Any) -> None:
        self.inner.set_timeout(timeout)

    def _counted(self, name: str, *args: Any) -> Any:
        self.counts[name] += 1
        return getattr(self.inner, name)(*args)

    def set(self, *args: Any) -> Any:
        return self._counted("set", *args)

    def get(self, *args: Any) -> Any:
        return self._counted("get", *args)

    def add(self, *args: Any) -> Any:
        return self._counted("add", *args)

    def wait(self, *args: Any) -> Any:
        return self._counted("wait", *args)


def _count(identity: Identity, folder: Path) -> None:
    stores, connect = [], groups._store

    def counting(*args: Any) -> CountingStore:
        stores.append(CountingStore(connect(*args)))  # type: ignore[arg-type]
        return stores[-1]

    groups._store = counting  # type: ignore[assignment]  # in this forked rank only
    layout = Layout(tp=2, dp=identity.world_size // 2)
    with groups.start(layout, identity, device="cpu", seed=1):
        (store,) = stores
        groups_joined = len(dist.distributed_c10d._world.pg_map)
        counts = dict(store.counts)
    (folder / f"{identity.rank}.json").write_text(json.dumps({"groups": groups_joined, "counts": counts}))


def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_world(tmp_path: Path) -> None:
    """One write for each group of its own; no read, no barrier, nothing for the groups of others.

    Two ranks look each other up when they first talk. This says nothing about NCCL.
    """
    seen = set()
    for world_size in (2, 4, 8):
        run_ranks(world_size, _count, tmp_path)
        for rank in range(world_size):
            of_rank = json.loads((tmp_path / f"{rank}.json").read_text())
            assert of_rank["counts"] == {"set": of_rank["groups"]}
            seen.add(of_rank["groups"])
    assert len(seen) == 1, seen
