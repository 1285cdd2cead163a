"""What is offloaded takes as much of the host's memory as predicted, and is refused where that is not there."""

import re
from pathlib import Path

import pytest

from tests.gpu_path.emulator import Emulation
from tests.gpu_path.trainings import Training, TrainingError, WarmDevice, memory_of

WIDE = (
    "--model.num_layers", "2", "--model.hidden_size", "512", "--model.ffn_hidden_size", "2048", "--model.seq_length",
    "1024", "--model.num_attention_heads", "4", "--model.num_query_groups", "4", "--train.global_batch_size", "2",
    "--train.train_iters", "2", "--precision.dtype", "bf16",
)  # fmt: skip
"""Tensors of a MiB or more, as they leave, in powers of two, as torch pins them."""
STATE = ("--optimizer.optimizer_cpu_offload", "true")
HALF = (*STATE, "--optimizer.optimizer_offload_fraction", "0.5")
BLOCK = ("--train.cpu_offloading_num_layers", "1")


@pytest.mark.parametrize(
    "layout, flags, bound",
    [
        ("", (*STATE, *BLOCK, "--train.global_batch_size", "1"), 0.05),
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in [
            ("", BLOCK, 0.05), ("pp2", BLOCK, 0.05), ("", STATE, 0.05),
            ("dp2overlap", STATE, 0.06),  # 4 % are 16-bit copies, one of each size, in torch's cache
            ("dp2zero2", STATE, 0.05), ("dp2zero3", STATE, 0.05),
            ("", HALF, 0.40),  # up to a whole tensor more: here of 4.2 million elements among 7
        ]),
    ],
)  # fmt: skip
@pytest.mark.campaign
def test_the_host_holds_what_is_predicted(
    te_device: WarmDevice, tmp_path: Path, layout: str, flags: tuple[str, ...], bound: float
) -> None:
    te_device.train(Training(layout=layout), tmp_path, Emulation(), (*WIDE, *flags))
    memory = memory_of(tmp_path)
    predicted, measured = (memory[side]["host"] / 2**20 for side in ("predicted", "measured"))
    print(f"{layout or 'one rank'} {' '.join(flags)}: predicted {predicted:.1f} MiB, {measured:.1f}")
    assert measured == pytest.approx(predicted, rel=bound)


def test_a_node_without_the_room_ends_the_run(te_device: WarmDevice, tmp_path: Path) -> None:
    """Before the model is built: half a trillion parameters take 8 TB."""
    huge = ("--model.num_layers", "128", "--model.hidden_size", "16384", "--model.ffn_hidden_size", "65536",
            "--model.num_query_groups", "4")  # fmt: skip
    with pytest.raises(TrainingError) as error:
        te_device.train(Training(), tmp_path, Emulation(), (*huge, *STATE))
    words = str(error.value)
    assert "exit code 2" in words
    said = re.search(r"has [\d.]+ GiB of memory, and its ranks are to offload ([\d.]+) GiB to it \((.*)\)", words)
    assert said and float(said[1]) * 2**30 == pytest.approx(16 * 128 * 16384 * (2 * 65536 + 4 * 16384), rel=0.01)
    assert said[2] == "optimizer.optimizer_cpu_offload"
