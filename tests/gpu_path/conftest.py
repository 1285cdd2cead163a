"""A warm process of the emulated device, and what one CPU rank trains, for all tests of this folder."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path.trainings import EXTENSION, WarmDevice, train_on_the_cpu, warm_device


@pytest.fixture(scope="session")
def device() -> Iterator[WarmDevice]:
    with warm_device() as warm:
        yield warm


@pytest.fixture(scope="session")
def te_device() -> Iterator[WarmDevice]:
    """With Transformer Engine's modules."""
    with warm_device(EXTENSION) as warm:
        yield warm


@pytest.fixture(scope="session")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of one CPU rank with a model and flags; trained once."""

    @cache
    def trained(shape: str, *flags: str) -> Path:
        run_dir = tmp_path_factory.mktemp(shape)
        train_on_the_cpu(run_dir, shape, flags)
        return run_dir

    return trained
