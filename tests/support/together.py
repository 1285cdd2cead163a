"""Scenarios that mostly wait are played side by side, in threads; each is a test of its own all the same.

A module has its ``scenario_…(…)`` functions, a ``played`` fixture of its own that calls ``play``, and one test:

    @pytest.mark.parametrize("name", names(globals()))
    def test_it(name: str, played: Played) -> None:
        played[name].result()
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

PREFIX = "scenario_"
Played = dict[str, Future[None]]


def names(module: Mapping[str, Any]) -> list[Any]:
    """Of the scenarios of a module, without their prefix, with their marks."""
    found = {name.removeprefix(PREFIX): played for name, played in module.items() if name.startswith(PREFIX)}
    return [pytest.param(name, id=name, marks=getattr(played, "pytestmark", ())) for name, played in found.items()]


def play(request: pytest.FixtureRequest, at_once: int, run: Callable[[str, Callable[..., None]], None]) -> Played:
    """``run(name, scenario)`` for each scenario whose test was asked for; what it raised is its future's result."""
    request.getfixturevalue("tmp_path_factory").getbasetemp()  # two threads that were first would make two of them
    wanted = [item.callspec.params["name"] for item in request.session.items if _is_played(item, request)]
    with ThreadPoolExecutor(at_once) as pool:
        return {name: pool.submit(run, name, getattr(request.module, PREFIX + name)) for name in wanted}


def _is_played(item: pytest.Item, request: pytest.FixtureRequest) -> bool:
    return isinstance(item, pytest.Function) and item.module is request.module and "played" in item.fixturenames
