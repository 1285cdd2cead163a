"""Parameters of which every run of the suite tries some; the rest are a campaign's (``--campaign``)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(every: Iterable[Any], suite: Collection[Any]) -> list[Any]:
    """For ``pytest.mark.parametrize``: each one, those outside ``suite`` with the mark."""
    listed = list(every)
    assert all(one in listed for one in suite), "the suite's are of them"
    return [one if one in suite else param(one) for one in listed]


def param(one: Any) -> Any:
    """For a campaign only. A tuple: an argument each."""
    return pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.campaign)
