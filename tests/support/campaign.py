"""Parameters of which every run of the suite tries some; the rest are a campaign's (``--campaign``)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(every: Iterable[Any], suite: Collection[Any]) -> list[Any]:
    """For ``pytest.mark.parametrize``: each one, those outside ``suite`` with the mark."""
    found = [one if one in suite else pytest.param(one, marks=pytest.mark.campaign) for one in every]
    assert not [one for one in suite if one not in found], "the suite's are of them"
    return found
