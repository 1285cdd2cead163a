"""``make versions``: the part of the suite that touches what torch changes between versions, in each environment given.

    python -m tests.versions .venv-oldest .venv-newest

Prints a table (torch, passed, failed, seconds); exit code 1 where a test failed, or none ran.
"""

import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple
from xml.etree import ElementTree

import tyro

from program import command
from program.errors import UserError
from program.flags import parse_flags

ROOT = Path(__file__).resolve().parents[2]
PART = (
    "tests/gpu_path/test_training.py::test_a_gpu_trains_as_a_cpu_does",
    "tests/training/checkpoint/test_checkpoint_layouts.py::test_shards_of_experts_restore_on_any_layout",
    "tests/training/checkpoint/test_checkpoint_layouts.py::test_same_layout_resumes_the_same_curve_with_dropout",
    "tests/gpu_path/test_device.py::test_operators_compute_what_the_cpus_do",
    "tests/models/test_compiled.py",
    "tests/tools/test_reshard_dcp.py::test_fsdps_checkpoint_becomes_ours",
    "tests/parallel/test_fsdp.py",
    "tests/training/checkpoint/test_pickle.py",
    "tests/models/test_packed.py",
    "tests/parallel/test_in_place.py",
    "tests/parallel/test_uneven.py",
)
"""Trainings on the emulated device beside the CPU's, checkpoints of one layout loaded in another, the device's
operators, compilation, torch's own checkpoints, shards and collectives, packed attention. Longest first, as the files
are dealt to two processes."""
DEALT = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(kw_only=True)
class Versions:
    """Run that part."""

    environments: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ENVIRONMENT ...")]
    """Folders of Python environments."""


class Outcome(NamedTuple):
    """Of one environment."""

    torch: str
    passed: int
    failed: int
    seconds: float


def run(environment: Path) -> Outcome:
    """The part in one environment, whose output goes to the terminal."""
    python = environment.absolute() / "bin" / "python"
    version = _answer(python, "import torch; print(torch.__version__)")
    print(f"\ntorch {version} ({environment.name})", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [python, "-m", "pytest", *PART, *DEALT, "-p", "no:cacheprovider", f"--junit-xml={results}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        passed, failed = _counted(results) if results.is_file() else (0, 0)
    return Outcome(version, passed, failed or int(code != 0), time.monotonic() - start)


def _answer(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _counted(results: Path) -> tuple[int, int]:
    """Tests that (passed, failed) of pytest's XML; skipped ones are neither."""
    [suite] = ElementTree.parse(results).getroot().iter("testsuite")
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return count["tests"] - failed - count["skipped"], failed


def main() -> int:
    """Exit code 1 where a test failed in any environment, or none ran."""
    job = parse_flags(Versions, None, "python -m tests.versions", __doc__)
    if not job.environments:
        raise UserError("expected folders of Python environments; `make versions` makes them, and runs this")
    for environment in job.environments:
        if not (environment / "bin/python").exists():
            raise UserError(f"no {environment}/bin/python: `make versions` makes the environments, and runs this")
    outcomes = [run(environment) for environment in job.environments]
    print(f"\n{'torch':<16}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for one in outcomes:
        print(f"{one.torch:<16}{one.passed:>8}{one.failed:>8}{one.seconds:>9.0f}")
    return int(any(one.failed or not one.passed for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(command.run("tests.versions", main))
