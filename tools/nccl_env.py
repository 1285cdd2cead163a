"""Which environment variables NCCL and torch read today, and what those that they no longer read are called now.

``nccl_env.txt`` has the names that stand in the libraries themselves, NCCL 2.29.7 and torch 2.13 (CUDA); a test
reads them again from the installed ones.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from program.untrusted import read_text

NAMES = Path(__file__).with_name("nccl_env.txt")
VERSIONS = "NCCL 2.29.7 and torch 2.13"
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")

TODAY = {
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL; leave it out: GPUDirect RDMA is used where there is a path",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_POINTERS, whose default 0 checks nothing",
    "NCCL_RINGS": "NCCL_GRAPH_FILE",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_SINGLE_RING_THRESHOLD": "NCCL_ALGO",
    "NCCL_TIMEOUT": "the recipe's parallel.distributed_timeout_minutes and fault.step_timeout_s; NCCL never read it",
    "NCCL_MIN_NRINGS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_CTAS",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "nothing: what it asked for is the default now",
}
"""Names of yesterday, with what has taken their place."""

NOT_SETTINGS = {"NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_ROOT_DIR", "NCCL_INCLUDE_DIR", "NCCL_LIB_DIR"}
"""What container images and builds leave in the environment; NCCL is not expected to read them."""


def warnings(environ: Mapping[str, str], where: str) -> list[str]:
    """One sentence for each variable of NCCL's or torch's in ``environ`` that they do not read, or by an old name.

    where: what set them, for the message.
    """
    known = read_names()
    ours = sorted(name for name in environ if name.startswith(PREFIXES) and name not in NOT_SETTINGS)
    return [f"{where}: {text}" for name in ours if (text := _warning(name, known)) is not None]


def read_names() -> list[str]:
    """The names that NCCL and torch read, in order."""
    return read_text(NAMES).split()


def _warning(name: str, known: Iterable[str]) -> str | None:
    if name in TODAY:
        return f"{name} is a name of yesterday; today it is {TODAY[name]}."
    if name in known:
        return None
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name} is not read by {VERSIONS} (a plugin of NCCL's may read it).{hint}"
