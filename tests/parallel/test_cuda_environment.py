"""Variables that CUDA reads at its start: by layout and card, unless the user has set them."""

import os
from pathlib import Path

import pytest

from parallel.config import ParallelConfig
from parallel.cuda_environment import lowest_capability, prepare, variables

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
TP, CP = ParallelConfig(tensor_model_parallel_size=2), ParallelConfig(context_parallel_size=2)


@pytest.mark.parametrize(
    "environ, parallel, capability, expected",
    [
        ({}, ParallelConfig(), 9.0, EXPANDABLE),
        ({}, TP, 8.0, EXPANDABLE | ONE),
        ({}, CP, 9.0, EXPANDABLE | ONE),
        ({}, TP, 10.0, EXPANDABLE),
        ({}, ParallelConfig(tensor_model_parallel_size=2, data_parallel_sharding_strategy="zero3"), 9.0, EXPANDABLE),
        ({}, ParallelConfig(megatron=("nccl_ub=True",)), 9.0, {}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, TP, 9.0, EXPANDABLE),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, TP, 9.0, ONE),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, TP, 9.0, ONE),
    ],
)
def test_by_layout_and_card(
    environ: dict[str, str], parallel: ParallelConfig, capability: float, expected: dict[str, str]
) -> None:
    assert variables(environ, parallel, capability) == expected


def test_deterministic_mode_asks_each_library() -> None:
    found = variables({"NCCL_ALGO": "Ring"}, ParallelConfig(), 9.0, deterministic=True)
    assert found == EXPANDABLE | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert variables({}, ParallelConfig(), 9.0, deterministic=True)["NCCL_ALGO"] == "^NVLS"


def test_nccl_registers_no_buffers_of_graphs() -> None:
    assert variables({}, TP, 10.0, graphs=True) == EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}
    assert variables({"NCCL_GRAPH_REGISTER": "1"}, TP, 10.0, graphs=True) == EXPANDABLE


def test_transformer_engine_tells_weights_from_activations_that_are_offloaded() -> None:
    assert variables({}, TP, 10.0, offloading=True) == EXPANDABLE | {"NVTE_CPU_OFFLOAD_V1": "1"}
    assert variables({"NVTE_CPU_OFFLOAD_V1": "0"}, TP, 10.0, offloading=True) == EXPANDABLE


def answering(folder: Path, text: str) -> dict[str, str]:
    """An environment whose nvidia-smi prints this."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_the_weakest_card_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = answering(tmp_path, "echo 10.0; echo 9.0")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert lowest_capability(environ) == 9.0
    prepare(environ, TP)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and environ["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize("text", ["exit 9", "echo No devices were found"])
def test_without_a_driver_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    environ = answering(tmp_path, text)
    monkeypatch.setenv("PATH", environ["PATH"])
    before = dict(environ)
    prepare(environ, TP)
    assert environ == before
