"""What must be the same on all ranks: configuration, code, library versions."""

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

from training.config.import_path import digest
from training.config.recipe import dump
from training.config.run_config import RunConfig

PACKAGES = ("program", "parallel", "models", "data", "training")
LIBRARIES = ("torch", "megatron-core", "transformer-engine", "numpy", "sentencepiece")


def facts(config: RunConfig, data_fingerprint: str) -> dict[str, str]:
    """Name -> value, to be compared over ranks by ``groups.same_everywhere``. Reads our sources once: a few ms."""
    versions = {f"the version of {name}": version(name) for name in LIBRARIES}
    return {
        "the configuration": dump(config),
        "Triplane's code": code_digest(),
        "the code of your callbacks, loss, optimizer and transformation": digest(config.import_paths),
        "the version of Python": platform.python_version(),
        **versions,
        "the prepared data": data_fingerprint,
    }


@functools.cache
def version(distribution: str) -> str:
    """Installed version, or "none"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def code_digest() -> str:
    """Hex digest of every Python file that a rank may run."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.blake2b(digest_size=8)
    packages = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    for path in [root / "pretrain_gpt.py", *packages]:
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
