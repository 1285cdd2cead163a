"""Compiles the emulated device for the installed torch: about 15 seconds, once for each torch and each source.

Needs g++ and nm. CUDA's headers come with torch's wheels and with nvidia-cuda-crt (pyproject.toml, extra "test").
"""

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILDS = HERE.parents[2] / "build" / "emulated_cuda"
PACKAGES = Path(sysconfig.get_paths()["purelib"])
TORCH = PACKAGES / "torch"
CUDA = next(
    (
        folder
        for folder in (PACKAGES / "nvidia/cu13/include", Path("/usr/local/cuda/include"))
        if (folder / "crt").is_dir()
    ),
    None,
)
"""CUDA's headers: of torch's wheels, or of a container that brings torch."""

RUNTIME = "runtime.cpp", "queues.cpp", "graphs.cpp", "memory.cpp", "nccl.cpp", "reductions.cpp"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", f"-isystem{CUDA}")
TORCH_FLAGS = (f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include")


class BuildError(Exception):
    """The device cannot be compiled here; the message says what is missing."""


def build() -> Path:
    """The folder with emulated_cuda.so, libcuda.so.1 and operators.so; whoever asks meanwhile waits for one build.

    Raises BuildError.
    """
    check()
    BUILDS.mkdir(parents=True, exist_ok=True)
    folder = BUILDS / key()
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=BUILDS))
            compile_all(unfinished)
            unfinished.rename(folder)
    return folder


def check() -> None:
    """Raises BuildError."""
    for program in ("g++", "nm"):
        if not shutil.which(program):
            raise BuildError(f"{program} is not installed: apt-get install g++ binutils")
    if CUDA is None:
        raise BuildError("CUDA's headers are missing: pip install nvidia-cuda-crt, of torch's CUDA version")
    if not (TORCH / "lib" / "libtorch_cuda.so").exists():
        raise BuildError(f"{TORCH} is built without CUDA: install a CUDA build of torch")


def key() -> str:
    """Of torch's build and all sources."""
    digest = hashlib.sha256((TORCH / "version.py").read_bytes())
    for source in sorted(HERE.iterdir()):
        if source.is_file():
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def compile_all(folder: Path) -> None:
    """Two compilers at a time."""
    stubs(
        folder / "runtime_stubs.c",
        ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so"),
        "cuda|cublas|nccl|__cuda",
    )
    stubs(folder / "driver_stubs.c", ("libcaffe2_nvrtc.so",), "cu[A-Z]")
    shared = "-shared", "-Wl,-z,nodelete"
    commands = [
        ("gcc", "-w", "-fPIC", "-c", "-o", "stubs.o", "runtime_stubs.c"),
        ("gcc", "-w", "-fPIC", *shared, "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", HERE / "driver.c",
         "driver_stubs.c", "-ldl"),
        *(("g++", *FLAGS, "-fvisibility=hidden", "-c", "-o", f"{source}.o", HERE / source) for source in RUNTIME),
    ]  # fmt: skip
    # as one unit: torch's headers take most of the time, and as long as all else
    operators = start(("g++", *FLAGS, *TORCH_FLAGS, "-include", HERE / "kernels.cpp", "-c", "-o", "operators.o",
                       HERE / "operators.cpp"), folder)  # fmt: skip
    for command in commands:
        finish(start(command, folder))
    finish(operators)
    libraries = f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu", "-lc10_cuda", "-ltorch_cuda"
    finish(start(("g++", *shared, "-o", "emulated_cuda.so", *(f"{source}.o" for source in RUNTIME), "stubs.o", "-ldl",
                  "-lpthread"), folder))  # fmt: skip
    finish(start(("g++", *shared, "-o", "operators.so", "operators.o", *libraries,
                  "-Wl,--unresolved-symbols=ignore-all"), folder))  # fmt: skip


def start(command: tuple[object, ...], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(list(map(str, command)), cwd=folder, text=True, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise BuildError(f"{process.args!r} ended with {process.returncode}:\n{errors[-3000:]}")


def stubs(path: Path, libraries: tuple[str, ...], names: str) -> None:
    """A weak function that returns 0 for whatever else torch's libraries ask of CUDA's; our own functions win."""
    wanted = set()
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", str(TORCH / "lib" / library)]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        wanted |= set(re.findall(rf" U ((?:{names})\w*)", table))
    attributes = '__attribute__((visibility("default"), weak))'
    path.write_text("".join(f"{attributes} int {name}() {{ return 0; }}\n" for name in sorted(wanted)))


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(f"{error}")
