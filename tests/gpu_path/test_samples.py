"""Samples on the emulated device: texts of one CPU rank, whenever streams run; scales of fp8 stay where they were.

In the suite, test_tasks.py samples in a run that is judged as well.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path import trainings
from tests.gpu_path.emulator import Emulation, Order
from tests.gpu_path.test_transformer_engine import BF16, WIDE, fp8
from tests.gpu_path.trainings import Training, WarmDevice

SAMPLED = ("--train.generate_tokens", "6", "--train.sample_interval", "2", "--train.sample_prompts", "def ", "x", "")


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout, shape, order",
    [("", "mistral_tiny", "random"), ("pp2vpp2", "debug", "late"), ("tp2sp", "deepseek_v3_tiny", "late"),
     ("ep2", "mixtral_tiny", "late"), ("dp2zero3", "debug", "random")],
)  # fmt: skip
def test_texts_are_those_of_a_cpu(
    te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path, layout: str, shape: str, order: Order
) -> None:
    te_device.train(Training(layout=layout, shape=shape), tmp_path, Emulation(order=order), SAMPLED)
    found = samples(tmp_path)
    assert len(found) == 6 and found == samples(on_the_cpu(shape, *SAMPLED))


@pytest.mark.campaign
def test_without_a_cache_over_context_ranks(device: WarmDevice, on_the_cpu: Any, tmp_path: Path) -> None:
    """Our own modules: Transformer Engine's attention over context ranks wants 16 bits."""
    device.train(Training(layout="cp2"), tmp_path, Emulation(order="late"), SAMPLED)
    assert samples(tmp_path) == samples(on_the_cpu("debug", *SAMPLED))


@pytest.mark.campaign
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("layout", ["dp2overlap", "tp2sp"])
def test_samples_leave_nothing_in_fp8(te_device: WarmDevice, tmp_path: Path, layout: str, recipe: str) -> None:
    for name, flags in (("plain", ()), ("sampled", SAMPLED)):
        te_device.train(Training(layout=layout), tmp_path / name, Emulation(), (*BF16, *WIDE, *fp8(recipe), *flags))
    differences = trainings.checkpoint_differences(tmp_path / "sampled", tmp_path / "plain", generators=True)
    assert {one.outcome for one in differences} == {"equal"}
    assert len(samples(tmp_path / "sampled")) == 6
