"""What lives, byte by byte, while the program runs: every storage from its first tensor to its last."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Live bytes of storages made under it, their peak, and the collectives that pass.

    held: tensors that are there already (weights, buffers), whose storages do not count.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as Meta (meta.py)

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.collectives: dict[str, dict[str, int]] = {}
        self._seen = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(str(func).split(".")[1], tree_leaves((args, kwargs)))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._enter(leaf.untyped_storage())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def _collective(self, name: str, leaves: list[Any]) -> None:
        """Bytes: of all tensors that the call names, inputs and outputs."""
        entry = self.collectives.setdefault(name.rstrip("_"), {"calls": 0, "bytes": 0})
        entry["calls"] += 1
        entry["bytes"] += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
