"""What every test shares: GPU tests are deselected where there is no GPU, and a prepared corpus."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks are forked from this process

import hypothesis
import pytest

import buckets
import huge_pages
from data.config import DataConfig
from data.prepare import prepare
from data.prepared import Prepared
from parallel.launch import count_gpus

LONGEST = (
    "test_layouts.py", "gpu_path/test_transformer_engine.py", "gpu_path/test_training.py", "training/test_runs.py",
    "test_from_megatron_script.py", "plan/test_trace.py", "test_prove_gpu.py", "test_supervise.py",
    "test_checkpoint_layouts.py", "test_requeue.py", "test_run_lock.py", "tools/test_report.py",
    "tools/test_generate.py", "test_preprocess_work.py", "test_doctor_nodes.py",
)  # fmt: skip
"""Files of 15 seconds and more: dealt first, so that all processes end at about the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--write_layouts``: see tests/test_layouts.py; ``--campaign``: the tests marked so, too."""
    parser.addoption("--write_layouts", action="store_true", help="write docs/layouts.md from what this run proves")
    parser.addoption("--campaign", action="store_true", help="run the tests of long campaigns, too")


def pytest_configure() -> None:
    """In a shell's background (``make test &``) Ctrl-C is ignored, and so it would be in every program under test.

    A drawn example may take as long as it takes: a machine that is busy is no failure.
    """
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest files first; deselect, never pass, what needs a GPU or belongs to a campaign."""
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))
    absent = [] if count_gpus(os.environ) else ["gpu"]
    absent += [] if config.getoption("campaign") else ["campaign"]
    left_out = [item for item in items if any(map(item.get_closest_marker, absent))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of this test session's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def prepared(cache_dir: Path) -> Prepared:
    """The built-in corpus in bytes: vocabulary 257."""
    return prepare(DataConfig(tokenizer="byte", cache_dir=str(cache_dir)), lambda _: None)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[buckets.Server]:
    """A real S3 server, SeaweedFS, with the bucket ``buckets.BUCKET``: some seconds, once in a process that asks."""
    with buckets.seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


def pytest_collection_finish() -> None:
    """As ``pretrain_gpt.py`` does: what was imported is for good, and forked ranks share it.

    Behind a freeze, Python walks all younger objects every 70,000 allocations; the planner's tests spent 6 % there.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    huge_pages.keep_collapsed()
