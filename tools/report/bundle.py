"""What a bug report needs of a run, in one archive: logs, stacks, verdicts, history, metrics, versions, the machine.

No tensors, no data, no batches. Secrets are replaced by their name, by the environment's values, and by their shape;
what is sent to others should be looked through all the same.
"""

import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import tomli_w

from program.errors import UserError
from program.untrusted import InputError, open_regular, read_toml
from tools.report.markup import moment
from tools.report.page import render
from tools.report.run_data import read_run
from tools.report.secrets_in_text import scrubbed
from tools.shared.written import check_file
from training.checkpoint.folders import checkpoints
from training.metrics.redaction import SECRET_NAME, redacted

HEAD_BYTES, TAIL_BYTES = 64 << 10, 4 << 20
"""Kept of a file: its beginning and its end, whole lines."""
MOST_LOGS = 40
FILES = (
    "history.jsonl", "metrics.jsonl", "attempts.jsonl", "evaluations.jsonl", "samples.jsonl", "owner.json",
    "skipped_samples.json", "done", "requeue", "watch/start-*/*.json", "watch/start-*/stacks-*.txt",
    "nonfinite/iter_*/found.json", "profile/iter_*/*summary.json", "profile/timeline.jsonl",
)  # fmt: skip
VARIABLES = ("NCCL_", "CUDA_", "SLURM_", "TORCH", "OMP_", "UCX_", "FI_", "NVTE_", "GLOO_", "TRIPLANE_", "PYTORCH_")
"""Beginnings of the environment's names that training heeds."""
COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "-q", "-d", "ECC,PAGE_RETIREMENT"),
    ("ibstat",),
)


def is_bundle(ends: bytes) -> bool:
    """By the first member of the archive, which gzip need not end for."""
    found = zlib.decompressobj(wbits=31)
    try:
        return b"/about.txt\0" in found.decompress(ends, 512)
    except zlib.error:
        return False


UNNAMED = Path()
"""Stands for the archive's usual name: RUN_DIR-bundle.tar.gz, beside the folder."""


def write_bundle(run_dirs: Sequence[Path], archive: Path) -> str:
    """Write the archive; what was done, in a sentence. Raises UserError where it cannot be."""
    if len(run_dirs) != 1:
        raise UserError(f"--bundle takes one run's folder, found {len(run_dirs)}.")
    if archive == UNNAMED:
        folder = run_dirs[0].resolve()
        archive = folder.with_name(f"{folder.name}-bundle.tar.gz")
    if not archive.name.endswith((".tar.gz", ".tgz")):
        raise UserError(f"--bundle {archive}: expected a name that ends in .tar.gz.")
    check_file(archive, "--bundle", is_bundle)
    run_dir, environ = run_dirs[0], os.environ
    run = read_run(run_dir)
    members = dict(_members(run_dir))
    members["report.html"] = render([run])
    members["about.txt"] = f"{__doc__}\nrun {run.name}, {moment(time.time())} UTC\n"
    try:
        descriptor = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, text in sorted(members.items()):
                data = scrubbed(text, environ).encode(errors="replace")
                entry = tarfile.TarInfo(f"{archive.name.split('.')[0]}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o644
                tar.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise UserError(f"{archive}: cannot be written: {error.strerror}.") from None
    size = archive.stat().st_size
    kept = f"{archive}: {len(members)} files, {size / 1e6:,.1f} MB"
    return f"{kept}. Secrets are replaced; look through it before you send it."


def _members(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file of the archive, secrets still in it."""
    root = run_dir.resolve()
    for pattern in FILES:
        for path in sorted(run_dir.glob(pattern)):
            if (text := _ends_of(path, root)) is not None:
                yield str(path.relative_to(run_dir)), text
    for path in _logs(run_dir):
        if (text := _ends_of(path, root)) is not None:
            yield f"logs/{path.name}", text
    yield "config.toml", _config(run_dir)
    yield "checkpoints.txt", "\n".join(_listing(checkpoints(run_dir)))
    yield "versions.txt", "\n".join(_versions())
    yield "machine.txt", "\n".join(_machine(run_dir, os.environ))


def _ends_of(path: Path, root: Path) -> str | None:
    """The beginning and the end of a file; None where it is none of the run's own, or cannot be read."""
    try:
        if path.is_symlink() or not path.resolve().is_relative_to(root):
            return None
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size <= HEAD_BYTES + TAIL_BYTES:
                return file.readall().decode(errors="replace")
            head = file.read(HEAD_BYTES).rpartition(b"\n")[0]
            file.seek(size - TAIL_BYTES)
            tail = file.readall().partition(b"\n")[2]
    except (OSError, InputError):
        return None
    between = f"\n... {size - TAIL_BYTES - HEAD_BYTES:,} bytes are left out\n"
    return head.decode(errors="replace") + between + tail.decode(errors="replace")


def _logs(run_dir: Path) -> list[Path]:
    """Those of ranks that failed, then the newest ones."""

    def age(path: Path) -> tuple[bool, float]:
        try:
            return ".failed." not in path.name, -path.stat().st_mtime
        except OSError:
            return True, 0.0

    return sorted((path for path in (run_dir / "logs").glob("*.log")), key=age)[:MOST_LOGS]


def _config(run_dir: Path) -> str:
    try:
        return tomli_w.dumps(redacted(read_toml(run_dir / "config.toml")))
    except (OSError, InputError) as error:
        return f"# cannot be read: {error}\n"


def _listing(folder: Path) -> Iterator[str]:
    """Names and sizes of the checkpoints' files."""
    for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")):
        try:
            facts = path.lstat()
            yield f"{facts.st_size:>16,}  {moment(facts.st_mtime)}  {path.relative_to(folder)}"
        except OSError as error:
            yield f"{path.name}: {error.strerror}"


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()}"
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    yield from (f"{name} {version}" for name, version in sorted(installed.items(), key=lambda one: str(one[0]).lower()))


def _machine(run_dir: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Of where this runs, which may be another node than the run's."""
    disk = shutil.disk_usage(run_dir)
    yield f"{platform.platform()}, {os.cpu_count()} CPUs, {psutil.virtual_memory().total / 2**30:.1f} GiB of memory"
    yield f"disk of the run's folder: {disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f}"
    for name, value in sorted(environ.items()):
        if name.startswith(VARIABLES) and not SECRET_NAME.search(name):
            yield f"{name}={value}"
    for command in COMMANDS:
        if shutil.which(command[0]) is None:
            yield f"\n$ {' '.join(command)}\nnot there"
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            yield f"\n$ {' '.join(command)}\n{done.stdout}{done.stderr}"
        except (OSError, subprocess.SubprocessError) as error:
            yield f"\n$ {' '.join(command)}\n{error}"
