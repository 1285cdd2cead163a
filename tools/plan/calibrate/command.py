"""calibrate FILE.toml: measures these ranks' cards and links, and writes them as a cluster file.

Alone it measures one card (or CPU); under srun or torchrun the links between its ranks too, within a node and, where
there are several nodes, between them.
"""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parallel import launch
from program.errors import UserError
from tools.clusters import Cluster
from tools.plan.calibrate.cluster_file import Curves, Host, fitted_cluster, table, text
from tools.plan.cost.constants import Constants, fitted
from tools.shared.written import check_new, write_new

if TYPE_CHECKING:
    import torch


def calibrate(path: Path) -> None:
    """Rank 0 writes the file. Raises UserError, alike on all ranks, where it exists or has no folder."""
    identity = launch.detect(os.environ) or launch.Identity()
    if identity.world_size == 1:
        _refuse(path, identity)  # before torch is imported: at once
    import torch
    import torch.distributed as dist

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", identity.local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if identity.world_size > 1:
        environment = dict(os.environ)
        launch.set_rendezvous(environment, identity)
        os.environ.update(environment)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        if identity.world_size > 1:
            _refuse(path, identity)
        host, curves = _measured(identity, device)
    finally:
        if identity.world_size > 1:
            dist.destroy_process_group()
    cluster, constants = fitted_cluster(host, curves, fitted(), on_cpu=kind == "cpu")
    if kind == "cpu":
        constants = _overhead(cluster, constants)
    if identity.rank == 0:
        write_new(path, text(cluster, host, curves, constants, fitted()))
        print("\n".join([*table(curves), f"written: {path}"]))


def _refuse(path: Path, identity: launch.Identity) -> None:
    """Rank 0 looks; the others, which may not see its disk, hear of it."""
    said: list[str | None] = [None]
    if identity.rank == 0:
        try:
            check_new(path)
        except UserError as error:
            said = [str(error)]
    if identity.rank == 0 and said == [None] and not path.resolve().parent.is_dir():
        said = [f"{path}: cannot be written: there is no folder {path.parent}."]
    if identity.world_size > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(said)
    if said[0] is not None:
        raise UserError(said[0])


def _measured(identity: launch.Identity, device: "torch.device") -> tuple[Host, Curves]:
    import torch
    import torch.distributed as dist

    from tools.plan.calibrate import collectives, measure

    formats = {"fp32": torch.float32}
    if device.type == "cuda":
        formats |= {"fp16": torch.float16}
        formats |= {"bf16": torch.bfloat16} if torch.cuda.get_device_capability(device) >= (8, 0) else {}
    node = launch.node_name(os.environ)
    nodes: list[str] = [node] * identity.world_size
    if identity.world_size > 1:
        dist.all_gather_object(nodes, node)
    curves = Curves(
        products=measure.products(device, formats),
        copy_gb_per_s=measure.memory_gb_per_s(device),
        collectives=collectives.curves(device, node, identity.local_rank) if identity.world_size > 1 else (),
        launches_us=launches_us(identity, device) if device.type == "cuda" else {},
    )
    return _host(identity, device, len(set(nodes))), curves


def launches_us(identity: launch.Identity, device: "torch.device") -> dict[str, float]:
    """All ranks at once, as in a run; rank 0 writes its own."""
    import torch
    import torch.distributed as dist

    from tools.plan.calibrate import measure

    found = {"launch_us": measure.launch_us(measure.linear(device), device)}
    if identity.world_size > 1:
        flag = torch.zeros(measure.SMALL, device=device)
        found["collective_launch_us"] = measure.launch_us(lambda: dist.all_reduce(flag), device)
    return found


def _host(identity: launch.Identity, device: "torch.device", nodes: int) -> Host:
    import torch

    cuda = device.type == "cuda"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or "none", "nccl": "none"}
    if cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    versions |= {"host": platform.platform(), "threads": str(torch.get_num_threads())}
    own = torch.cuda.get_device_properties(device).total_memory if cuda else memory // identity.local_world_size
    return Host(
        name=torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        memory_bytes=own,
        host_gib=round(memory / 2**30, 1),
        cpus=os.cpu_count() or 1,
        ranks=identity.world_size,
        nodes=nodes,
        fabric=_network(),
        versions=versions,
    )


def _network() -> Literal["infiniband", "efa", "ethernet"]:
    """What this node's adapters are, as far as Linux says."""
    devices = Path("/sys/class/infiniband")
    names = [path.name for path in devices.iterdir()] if devices.is_dir() else []
    if any("efa" in name or name.startswith("rdmap") for name in names):
        return "efa"
    return "infiniband" if names else "ethernet"


def _overhead(cluster: Cluster, constants: Constants) -> Constants:
    """Every rank measures, so that they disturb each other as they will in a run."""
    from tools.plan.calibrate import overhead

    return overhead.measured(cluster, constants)
