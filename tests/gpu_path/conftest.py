"""A warm process of the emulated device, and what one CPU rank trains, for all tests of this folder."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path.trainings import EXTENSION, WarmDevice, train_on_the_cpu, warm_device


@pytest.fixture(scope="session")
def brief(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Flags before those of a test, which win: the suite's runs are short, a campaign's have a layout's 4 iterations of
    8 microbatches."""
    short = ("--train.train_iters", "2", "--train.global_batch_size", "4")
    return () if request.config.getoption("campaign") else short


@pytest.fixture(scope="session")
def half(brief: tuple[str, ...]) -> tuple[str, ...]:
    """Flags: a run ends after half of its iterations."""
    return ("--train.exit_interval", "1" if brief else "2")


@pytest.fixture(scope="session")
def device(brief: tuple[str, ...]) -> Iterator[WarmDevice]:
    with warm_device(flags=brief) as warm:
        yield warm


@pytest.fixture(scope="session")
def te_device(brief: tuple[str, ...]) -> Iterator[WarmDevice]:
    """With Transformer Engine's modules."""
    with warm_device(EXTENSION, flags=brief) as warm:
        yield warm


@pytest.fixture(scope="session")
def on_the_cpu(brief: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of one CPU rank with a model and flags; trained once."""

    @cache
    def trained(shape: str, *flags: str) -> Path:
        run_dir = tmp_path_factory.mktemp(shape)
        train_on_the_cpu(run_dir, shape, (*brief, *flags))
        return run_dir

    return trained
