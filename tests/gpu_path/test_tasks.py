"""Tasks of lm-evaluation-harness on the emulated device: scores and texts of one CPU rank, whenever streams run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.test_samples import SAMPLED, samples
from tests.gpu_path.test_transformer_engine import BF16, WIDE, fp8
from tests.gpu_path.trainings import Training, WarmDevice

NAMES = ("triplane_capitals", "triplane_proverbs", "triplane_completions")
JUDGED = (
    "--eval.interval", "2", "--eval.limit", "4", "--eval.task_folder", "tests/training/evaluation/tasks",
    "--eval.tasks", *NAMES,
)  # fmt: skip
Scores = dict[tuple[int, str], dict[str, float]]


@pytest.fixture(scope="module", autouse=True)
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of data sets of the tests' own, for this process and for that of the device."""
    folder = str(tmp_path_factory.mktemp("data_sets"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DATASETS_CACHE", folder)
        patched.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        yield


def scores(run_dir: Path) -> Scores:
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    return {(line["iteration"], line["task"]): line["metrics"] for line in lines}


def judged(device: WarmDevice, training: Training, run_dir: Path, order: Order, *flags: str) -> Scores:
    import datasets

    cache = {"HF_DATASETS_CACHE": datasets.config.HF_DATASETS_CACHE, "HF_HUB_OFFLINE": "1"}
    device.train(training, run_dir, Emulation(order=order, settings=cache), (*JUDGED, *flags))
    return scores(run_dir)


@pytest.mark.parametrize(
    "layout, shape, order",
    [
        ("tp2sp", "debug", "late"),
        *(pytest.param(layout, shape, order, marks=pytest.mark.campaign)
          for layout, shape, order in [
              ("dp2overlap", "debug", "random"), ("pp2vpp2", "debug", "late"), ("dp2zero3", "debug", "random"),
              ("ep2", "mixtral_tiny", "late"), ("tp2sp", "deepseek_v3_tiny", "late"), ("tp2sppp2", "debug", "late"),
          ]),
    ],
)  # fmt: skip
@pytest.mark.campaign
def test_scores_are_those_of_a_cpu(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    """And samples, which are written in the same runs."""
    found = judged(te_device, Training(layout=layout, shape=shape), tmp_path, order, *SAMPLED)
    reference = on_the_cpu(shape, *JUDGED, *SAMPLED)
    expected = scores(reference)
    assert samples(tmp_path) == samples(reference) != []
    assert found.keys() == expected.keys() and {task for _, task in found} == set(NAMES)
    for key, metrics in found.items():
        assert metrics == pytest.approx(expected[key], rel=1e-4), key


@pytest.mark.campaign
def test_over_context_ranks(device: WarmDevice, on_the_cpu: Any, tmp_path: Path) -> None:
    """Our own modules: Transformer Engine's attention over context ranks wants 16 bits."""
    found = judged(device, Training(layout="cp2"), tmp_path, "late")
    assert {key: pytest.approx(value, rel=1e-4) for key, value in scores(on_the_cpu("debug", *JUDGED)).items()} == found


@pytest.mark.campaign
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("layout", ["dp2overlap", "tp2sp"])
def test_tasks_leave_nothing_in_fp8(te_device: WarmDevice, tmp_path: Path, layout: str, recipe: str) -> None:
    flags = (*BF16, *WIDE, *fp8(recipe))
    te_device.train(Training(layout=layout), tmp_path / "plain", Emulation(), flags)
    assert len(judged(te_device, Training(layout=layout), tmp_path / "judged", "late", *flags)) == 2 * len(NAMES)
    differences = trainings.checkpoint_differences(tmp_path / "judged", tmp_path / "plain", generators=True)
    assert {one.outcome for one in differences} == {"equal"}
