"""Checkpoints: a folder per saved iteration, which any layout restores.

    save      write one, by all ranks
    restore   continue from the newest one, or start from another
    settled   hold the parameters still, gathered, while they are read

Model weights and optimizer state lie in it as pieces of global tensors, in the files that ``format`` describes;
everything else is versioned JSON. ``folders``, ``format`` and ``state`` work without torch, so what
needs it is imported only when it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.checkpoint.model_state import settled
    from training.checkpoint.restoring import Restored, restore
    from training.checkpoint.saving import Contents, save

__all__ = ["Contents", "Restored", "restore", "save", "settled"]

_MODULES = {
    "Contents": "saving",
    "Restored": "restoring",
    "restore": "restoring",
    "save": "saving",
    "settled": "model_state",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
