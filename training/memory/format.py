"""Bytes as people read them."""

from training.memory.predicted import CATEGORIES, Predicted


def size(number: float) -> str:
    """``1.23 GiB``; below a tenth of one, MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.2f} MiB"


def largest_first(found: Predicted) -> str:
    """``optimizer 40.10 GiB, activations 12.00 GiB, ...``, without what is nothing."""
    held = {name: getattr(found, name) for name in CATEGORIES}
    return ", ".join(f"{name} {size(held[name])}" for name in sorted(held, key=lambda name: -held[name]) if held[name])
