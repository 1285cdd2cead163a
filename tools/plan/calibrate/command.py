"""--calibrate FILE.toml: measures this node and writes it as a cluster file.

Its figures are those of a datasheet under which the planner's shares (cost/fitted.toml) give what was measured. Alone
it measures one card (or CPU); under srun or torchrun the links between its ranks too.
"""

import datetime
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from parallel import launch
from parallel.errors import UserError
from tools.plan.cost.constants import fitted
from tools.plan.machine import generation

if TYPE_CHECKING:
    import torch

PRODUCTS = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024)}
COPIED = {"cuda": 2**28, "cpu": 2**24}
GATHERED = {"cuda": 2**27, "cpu": 2**20}


def calibrate(path: Path) -> None:
    """Rank 0 writes the file. Raises UserError where it exists."""
    import torch
    import torch.distributed as dist

    if path.exists():
        raise UserError(f"{path}: exists already. Choose another name, or remove it.")
    identity = launch.detect(os.environ) or launch.Identity()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", identity.local_rank) if kind == "cuda" else torch.device("cpu")
    if identity.world_size > 1:
        environment = dict(os.environ)
        launch.set_rendezvous(environment, identity)
        os.environ.update(environment)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    table = measured(identity, device)
    if identity.rank == 0:
        path.write_text(_head(torch.__version__, torch.version.cuda, identity) + tomli_w.dumps(table))
        print(f"written: {path}\n{tomli_w.dumps(table)}")
    if identity.world_size > 1:
        dist.destroy_process_group()


def measured(identity: launch.Identity, device: "torch.device") -> dict[str, dict[str, object]]:
    """The tables of a cluster file."""
    import torch

    from tools.plan.calibrate import measure

    cuda, shares = device.type == "cuda", fitted()
    formats = {"fp32": torch.float32, **({"bf16": torch.bfloat16, "fp16": torch.float16} if cuda else {})}
    by_generation = {"ampere": shares.gemm_ampere, "blackwell": shares.gemm_blackwell}
    name = torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}"
    share = by_generation.get(generation(name), shares.gemm_hopper)
    peaks = {kind: round(_best(device, dtype) / share, 3) for kind, dtype in formats.items()}
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else _host_gib() * 2**30
    bandwidth = measure.memory_gb_per_s(device, COPIED[device.type])
    rate, wait_us = 1.0, 1.0
    if identity.world_size > 1:
        rate, wait_us = measure.gather_gb_per_s(device, GATHERED[device.type]), measure.gather_latency_us(device)
    ranks = max(1, identity.local_world_size)
    return {
        "gpu": {
            "name": name, "memory_gib": round(memory / 2**30, 1), "memory_gb_per_s": round(bandwidth / 0.8, 1),
            "peak_tflops": peaks,
        },
        "node": {"gpus_per_node": ranks, "cpus_per_node": os.cpu_count() or 1, "memory_gib": _host_gib()},
        "fabric": {
            "scale_up_gb_per_s": round(rate / shares.scale_up, 3), "scale_up_domain": ranks,
            "scale_up_latency_us": round(wait_us, 1), "kind": "ethernet", "nics_per_node": 1,
            "nic_gb_per_s": round(rate / shares.nics, 3), "latency_us": round(wait_us, 1),
        },
        "price": {"usd_per_gpu_hour": 1.0, "source": "not known: write yours", "date": _today()},
    }  # fmt: skip


def _best(device: "torch.device", dtype: "torch.dtype") -> float:
    from tools.plan.calibrate import measure

    return max(measure.products_tflops(device, dtype, size) for size in PRODUCTS[device.type])


def _host_gib() -> float:
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _head(torch_version: str, cuda: str | None, identity: launch.Identity) -> str:
    ranks = "one rank: links are not measured" if identity.world_size == 1 else f"{identity.world_size} ranks"
    return (
        f"# Measured on {_today()} with torch {torch_version}, CUDA {cuda or 'none'}, {ranks}, by\n"
        "# python -m tools.plan --calibrate. The figures are those under which the planner's shares of\n"
        "# cost/fitted.toml give what was measured. Between nodes nothing was measured: write your adapters' figures\n"
        "# into [fabric], and prices into [price].\n"
    )
