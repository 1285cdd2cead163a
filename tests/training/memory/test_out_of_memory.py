"""A run that runs out of memory ends with what holds less: once, whichever ranks failed."""

import re
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import runs
from data.prepared import Prepared
from parallel.failures import report
from training import train
from training.memory.out_of_memory import is_of_the_host, is_out_of_memory, of_the_host

ADVICE, NEXT = "out of memory: predicted are ", "Single changes, "


def test_an_error_within_a_step(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(train, "train_step", fail)
    config = runs.configuration(tmp_path / "run", "--train.eval_interval", "None", "--train.micro_batch_size", "4")
    code, failure = runs.train_or_fail(prepared, config, 2)
    assert code == 1 and failure is not None
    last = failure.text.strip().rpartition("\n")[2]  # which the verdict repeats
    assert last == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    report(failure, tmp_path / "run" / "logs", 2)
    said = capsys.readouterr().err
    assert said.count(ADVICE) == said.count(NEXT) == 1 and said.index("failed first") < said.index(ADVICE)


def test_an_allocation_that_fails(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real one, of 8 GiB, on both ranks, by a limit of their address space."""
    room, resolve = 4 << 30, train.resolve

    def limited(*arguments: Any) -> Any:
        limit = psutil.Process().memory_info().vms + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return resolve(*arguments)

    monkeypatch.setattr(train, "resolve", limited)
    flags = (
        "--model.hidden_size 1024 --model.num_layers 1 --model.seq_length 65536 --train.micro_batch_size 32 "
        "--train.global_batch_size 64 --train.eval_interval None"
    )
    code, failure = runs.train_or_fail(prepared, runs.configuration(tmp_path / "run", *flags.split()), 2)
    assert code == 1 and failure is not None
    assert "can't allocate memory: you tried to allocate 8589934592 bytes" in failure.text
    report(failure, tmp_path / "run" / "logs", 2)
    said = capsys.readouterr().err
    assert said.count(ADVICE) == 1
    predicted, changes = said[said.index(ADVICE) :].split(NEXT)
    assert "(activations " in predicted and "ulimit -v" in predicted
    assert "--train.micro_batch_size 1: " in changes and "run/config.toml --num_gpus 2" in changes
    (own,) = (tmp_path / "run" / "logs").glob("*.failed.log")
    assert own.read_text().endswith(said[said.index(ADVICE) :])


def test_which_errors_these_are() -> None:
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"):
        assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("Connection reset by peer"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(own := RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_of_the_host(own) and is_of_the_host(MemoryError())
    assert re.match(r"out of the host's memory: [\d.]+ GiB are left of [\d.]+ GiB on this node", of_the_host())
    assert not is_of_the_host(RuntimeError("CUDA error: out of memory"))
