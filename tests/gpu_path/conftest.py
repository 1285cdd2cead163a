"""A warm process of the emulated device, and what one CPU rank trains, for all tests of this folder."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import runs
from tests.gpu_path.trainings import Training, WarmDevice, warm_device
from training.cli import parse
from training.prepare import prepare


@pytest.fixture(scope="session")
def device() -> Iterator[WarmDevice]:
    with warm_device() as warm:
        yield warm


@pytest.fixture(scope="session")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of one CPU rank with a model; trained once."""

    @cache
    def trained(shape: str) -> Path:
        run_dir = tmp_path_factory.mktemp(shape)
        Training(shape=shape).write_recipe(run_dir / "recipe.toml")
        config = parse.parse_config([str(run_dir / "recipe.toml"), "--run_dir", str(run_dir)])
        runs.train(prepare(config, None), config, 1)
        return run_dir

    return trained
