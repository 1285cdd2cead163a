"""What the numbers depend on: cards, driver, clocks, links, libraries, the host."""

import os
import re
import subprocess

from parallel import launch
from program import host_memory
from program.errors import UserError
from tests.benchmarks.circumstances import circumstances
from tests.gpu import machine
from tests.gpu.subject_run import SubjectRun
from tools.doctor import nvidia_smi

SETTINGS = ("CUDA_", "NCCL_", "NVTE_", "NVIDIA_TF32", "TORCH_", "PYTORCH_", "OMP_NUM")
"""Beginnings of the variables that change what a GPU program does."""
UNSAID = ("uuid", "name", "driver_version")
"""Of a card: not sent, or said already."""


def environment(run: SubjectRun) -> None:
    """Raises UserError where there is no GPU, or torch cannot use it."""
    require_gpu()
    found = machine.look()
    run.note("machine", found.record())
    run.say(*found.lines())
    host = {name: value for name, value in circumstances().items() if name in ("cpu", "cores", "python")}
    memory_gib = host_memory.available_bytes() / 2**30
    run.note("host", host | {"memory_gib": memory_gib})
    run.say(
        f"{host['cores']} cores of {host['cpu']}, {memory_gib:.0f} GiB of host memory free, Python {host['python']}"
    )
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    run.note("settings", settings)
    run.say("settings: " + (", ".join(f"{name}={value}" for name, value in settings.items()) or "none"))
    run.part("libraries", lambda: libraries(run))
    run.part("cards", lambda: cards(run))
    run.part("topology", lambda: topology(run))


def require_gpu() -> None:
    """Raises UserError where there is no GPU, or torch cannot use it."""
    if not launch.count_gpus(os.environ):
        raise UserError("no GPU was found here: nothing is proved. Run it on a machine with one or more NVIDIA GPUs.")
    launch.choose_device("cuda", os.environ)


def libraries(run: SubjectRun) -> None:
    """What torch was built with, and whether Transformer Engine can be imported."""
    import torch

    built = {"cudnn": torch.backends.cudnn.version(), "architectures": torch.cuda.get_arch_list()}
    run.note("torch", built)
    run.say(f"cuDNN {built['cudnn']}, torch is built for {', '.join(built['architectures']) or 'unknown cards'}")
    if run.numbers["machine"]["versions"]["transformer-engine"]:
        import transformer_engine.pytorch as te  # a half installation fails here, by name

        run.say(f"Transformer Engine imports from {len(te.__path__)} folder")


def cards(run: SubjectRun) -> None:
    """Clocks, power limits and what holds them down, in nvidia-smi's words."""
    if run.numbers["machine"]["driver"] is None:
        run.say("no driver answers (nvidia-smi): clocks and links are not known")
        return
    found = [{name: value for name, value in card.items() if name not in UNSAID} for card in nvidia_smi.gpus()]
    run.note("cards", found)
    run.say(*(", ".join(f"{name} {value}" for name, value in card.items()) for card in found))
    run.note("clocks", answer("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"))


def topology(run: SubjectRun) -> None:
    """Which links lie between cards, adapters and cores, as text."""
    if run.numbers["machine"]["driver"] is not None:
        run.note("topology", answer("nvidia-smi", "topo", "-m"))
        run.note("nvlink", answer("nvidia-smi", "nvlink", "--status"))


def answer(*command: str) -> str:
    """What it prints, errors included, without cards' numbers: it is for people."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    return re.sub(r"GPU-[0-9a-f-]+", "GPU-...", done.stdout)
