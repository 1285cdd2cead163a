"""train.compile on the emulated device: Dynamo and all of Inductor before its kernels, with what a GPU alone has."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path.emulator import Emulation
from tests.gpu_path.launches import COMPILE, INDUCTOR_FRONT
from tests.gpu_path.trainings import Training, WarmDevice, assert_same, memory_of

EMULATION = Emulation(order="late", hooks=(INDUCTOR_FRONT,))
OFFLOAD = ("--train.cpu_offloading_num_layers", "1")
WIDE = (
    "--model.hidden_size", "512", "--model.ffn_hidden_size", "2048", "--model.seq_length", "1024",
    "--model.num_attention_heads", "4", "--train.global_batch_size", "1", "--train.train_iters", "3",
    "--precision.dtype", "bf16",
)  # fmt: skip


def graphs(printed: str) -> str:
    """What the first step compiled."""
    (line,) = (line for line in printed.splitlines() if "went into compiling" in line)
    return line.partition("went into compiling ")[2]


def assert_nothing_is_compiled_again(run_dir: Path) -> None:
    """After the first step."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) > 1 and not any(step["recompilations"] for step in steps)


@pytest.mark.campaign
def test_a_gpu_compiles_no_block_for_its_number(te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path) -> None:
    """The watch for stragglers, whose events would be traced, is on. Again: rotary positions of fewer heads."""
    printed = te_device.train(Training(), tmp_path, EMULATION, COMPILE)
    assert graphs(printed) == "7 graphs of 20 operations, 1 of them again for other sizes or kinds"
    assert_nothing_is_compiled_again(tmp_path)
    assert_same(tmp_path, on_the_cpu("debug"))


@pytest.mark.campaign
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize(
    "layout, shape, flags",
    [
        ("", "debug", OFFLOAD), ("tp2sp", "debug", ()), ("pp2vpp2", "debug", ()), ("dp2zero3", "debug", ()),
        ("ep2", "mixtral_tiny", ()), ("tp2sp", "deepseek_v3_tiny", ()), ("", "qwen3_next_tiny", ()),
    ],
)  # fmt: skip
def test_layouts_train_compiled_as_one_cpu_rank(
    device: WarmDevice, te_device: WarmDevice, on_the_cpu: Any, tmp_path: Path,
    layout: str, shape: str, flags: tuple[str, ...], engine: bool,
) -> None:  # fmt: skip
    printed = (te_device if engine else device).train(
        Training(layout=layout, shape=shape), tmp_path, EMULATION, (*COMPILE, *flags)
    )
    assert graphs(printed)
    assert_nothing_is_compiled_again(tmp_path)
    assert_same(tmp_path, on_the_cpu(shape))


@pytest.mark.campaign
def test_compiled_blocks_keep_the_same_bytes(te_device: WarmDevice, tmp_path: Path) -> None:
    """Dense ones, by the difference of eight blocks and four, as the planner takes it (Software.compiled)."""
    kept = dict[bool, float]()
    for compiled in (False, True):
        activations = []
        for blocks in (4, 8):
            run_dir = tmp_path / f"{compiled}-{blocks}"
            flags = (*WIDE, "--model.num_layers", str(blocks), *(COMPILE if compiled else ()))
            te_device.train(Training(), run_dir, EMULATION, flags)
            activations.append(memory_of(run_dir)["measured"]["activations"])
        kept[compiled] = activations[1] - activations[0]
    assert kept[True] == pytest.approx(kept[False], rel=0.01)
    assert kept[True] > 2**20
