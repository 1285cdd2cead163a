"""Faults of the surroundings that a program was started in: whose words say which setting is in the way, not where.

An uncaught exception that is none of these is a fault of the program or of the machine.
"""

import errno
import os
import re
import resource
import sys
import traceback
from pathlib import Path

NO_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "cannot apply additional")
TORCH_VARIABLES = ("TORCH", "PYTORCH", "GLOO_", "NCCL_", "OMP_", "KMP_", "MKL_", "PYTHON", "CUDA_", "NVTE_")
"""Beginnings of the names of variables that torch and what it loads read."""


def problem(error: BaseException) -> str | None:
    """What is wrong with the surroundings, and what to do; None where ``error`` does not say."""
    if isinstance(error, Warning):
        return (
            f"warnings are errors here (PYTHONWARNINGS or -W), and a library warns: {_first_line(error)} Unset it, or "
            "name your own module in it: error:::my_module"
        )
    limit = address_space()
    if limit is not None and (isinstance(error, MemoryError) or any(text in str(error).lower() for text in NO_MEMORY)):
        return f"{memory_limit(limit)} ({_first_line(error)})"
    if variable := _blamed(error):
        return f"{variable}={os.environ[variable][:60]!r} in the environment: {_first_line(error)} Mend or unset it."
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and folder_is_gone():
        return GONE
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:
        return f"{os.fsdecode(error.filename)}: {error.strerror}. Ask its owner for the right to it, or name another."
    return None


GONE = "the folder that it was started in has been removed: change to one that is there (cd), and start it again."


def folder_is_gone() -> bool:
    """Whether the current folder has been removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def address_space() -> int | None:
    """``ulimit -v`` in bytes; None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def memory_limit(limit: int) -> str:
    return (
        f"the address space of this process is limited to {limit / 2**30:.2f} GiB (ulimit -v), which is too little "
        "for torch and what it loads. Raise it: ulimit -v unlimited"
    )


def _blamed(error: BaseException) -> str | None:
    """The variable that a library's own check of the environment complains of. One that is named with a value is
    advice: "run with NCCL_DEBUG=INFO", as what CUDA and NCCL raise for any fault says."""
    said = str(error)
    own = any("/torch/_logging/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)[-3:])
    if own and "TORCH_LOGS" in os.environ:
        return "TORCH_LOGS"
    ours = (name for name in os.environ if name.startswith(TORCH_VARIABLES))
    named = [name for name in ours if re.search(rf"\b{re.escape(name)}\b(?!=)", said)]
    return max(named, key=len, default=None)


def _first_line(error: BaseException) -> str:
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return line[:300].rstrip(".") + "."


def torch_fits() -> str | None:
    """What to say where the address space is too small to load torch: its C++ would abort without a word."""
    limit = address_space()
    folders = (Path(path, "torch/lib") for path in sys.path)
    found = None if limit is None else next(filter(Path.is_dir, folders), None)
    if limit is None or found is None:
        return None
    libraries = sum(path.stat().st_size for path in found.iterdir())
    return memory_limit(limit) if limit < libraries + BESIDE_BYTES else None


BESIDE_BYTES = 3 << 30
"""Address space that Python, torch's other libraries and its threads take: 2.5 GiB (torch 2.13 on 2 cores)."""
