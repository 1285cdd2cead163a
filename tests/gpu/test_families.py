"""The subject ``specs``: a family that fails, or ends its process, leaves the others their rows."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from parallel.launch import Identity
from ranks import run_ranks
from tests.gpu import specs
from tests.gpu.machine import GpuMachine
from tests.gpu.sizes import SIZES
from tests.gpu.subject_run import SubjectRun
from tests.gpu.subjects import modules

NAMES = list(specs.CASES)
EQUAL = {"logits": 0.0, "gradient": 0.0, "worst": "a", "tensors": 1}


def test_a_family_that_fails_is_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(specs.MODELS["gpt2_tiny"], num_attention_heads=7)
    monkeypatch.setitem(specs.MODELS, "gpt2_tiny", model)
    names, results = ["fp32-gpt2_tiny", "bf16-dense"], tmp_path / "results.jsonl"

    def measure(identity: Identity) -> None:
        specs.measure(identity, names, str(results), device="cpu")

    run_ranks(1, measure)
    failed, after = map(json.loads, results.read_text().splitlines())
    assert failed["name"] == names[0] and failed["error"]
    assert after["name"] == names[1] and after["tensors"] > 20


@dataclasses.dataclass(kw_only=True)
class Ending(SubjectRun):
    """Whose process ends in some cases, within a line of its results."""

    ends_in: tuple[str, ...]
    asked: list[list[str]] = dataclasses.field(default_factory=list)

    def measured(self, measurement: str, *_: Any, names: Any = (), results: Any = "", **__: Any) -> list[Any]:
        self.asked.append(list(names))
        with Path(str(results)).open("a") as file:
            for name in names:
                if name in self.ends_in:
                    file.write('{"name": "')
                    raise RuntimeError(f"exit code 1 in {name}")
                found = {"error": "ValueError: shape"} if name == NAMES[5] else EQUAL
                file.write(json.dumps({"name": name} | found) + "\n")
        return []


def test_a_process_that_ends_loses_what_comes_after() -> None:
    """That has a new one; a family is to blame where a fresh process ends in it, too."""
    machine = GpuMachine(versions={"transformer-engine": "2.19.0"})
    run = Ending(machine=machine, sizes=SIZES["tiny"], ends_in=(NAMES[2], NAMES[-1]))
    modules.specs(run)
    assert [asked[0] for asked in run.asked] == [NAMES[0], NAMES[2], NAMES[3], NAMES[-1]]
    assert run.problems == [
        f"{NAMES[2]}: RuntimeError: exit code 1 in {NAMES[2]}",
        f"{NAMES[5]}: RuntimeError: ValueError: shape",
        f"{NAMES[-1]}: RuntimeError: exit code 1 in {NAMES[-1]}",
    ]
    assert run.numbers["rows"].keys() == {*NAMES} - {NAMES[2], NAMES[-1]}
    assert run.headline == f"{len(NAMES) - 3} of {len(NAMES)} agree"


def test_rows_without_time_are_late(tmp_path: Path) -> None:
    machine = GpuMachine(versions={"transformer-engine": "2.19.0"})
    run = Ending(machine=machine, sizes=SIZES["tiny"], ends_in=(), deadline=0.0)
    modules.specs(run)
    assert run.late == NAMES and run.problems == run.asked == []
