"""A hook: a mutant whose cross entropy is a tenth of a percent too large."""

from typing import Any

from transformer_engine.pytorch import cross_entropy

right = cross_entropy.parallel_cross_entropy


def wrong(*args: Any, **kwargs: Any) -> Any:
    return 1.001 * right(*args, **kwargs)


cross_entropy.parallel_cross_entropy = wrong
