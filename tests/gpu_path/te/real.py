"""What Transformer Engine's compiled extension offers: its bindings compiled, its kernels left out.

``python -m tests.gpu_path.te.real FOLDER`` compiles pybind.cpp of the source package in FOLDER (`make te-extension`
puts it there) in half a minute, links it with functions that return 0 in place of all that it binds, and prints, as
JSON, the signature of each function and the values of each enum. Needs g++ and nm, and no CUDA compiler.
"""

import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tests.gpu_path.device.build import PACKAGES, TORCH, finish, start

NAME = "transformer_engine_torch"
LEFT_OUT = re.compile(r"transformer_engine|CommOverlap|nvte_|^(nccl|cudnn|cublas|cuda|cu[A-Z])")
TYPE = "_ZTI"
TABLE = "_ZTV"
FLAGS = ("-std=c++20", "-O0", "-g0", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}",
         "-DTORCH_API_INCLUDE_EXTENSION_H")  # fmt: skip


def compile_bindings(folder: Path) -> Path:
    """The extension's shared object, made once."""
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    (source,) = (path for path in folder.glob(f"{NAME}-*") if path.is_dir())
    own = [
        source / part for part in ("csrc", "common_headers", "common_headers/common", "common_headers/common/include")
    ]
    # cccl's headers are not among torch's; where each wheel has its own, both are called nvidia/cu13/include.
    system = [TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    system += [root / "nvidia" / part / "include" for root in (PACKAGES, folder) for part in ("cu13", "cudnn", "nccl")]
    include = [f"-I{path}" for path in own] + [f"-isystem{path}" for path in system]
    finish(start(("g++", *FLAGS, *include, "-c", "-o", "pybind.o", source / "csrc/extensions/pybind.cpp"), folder))
    (folder / "stubs.c").write_text(stubs(undefined(folder / "pybind.o")))
    finish(start(("gcc", "-w", "-fPIC", "-c", "-o", "stubs.o", "stubs.c"), folder))
    libraries = ("-lc10", "-lc10_cuda", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-ltorch_python")
    finish(
        start(("g++", "-shared", "-o", "unfinished.so", "pybind.o", "stubs.o", f"-L{TORCH}/lib", *libraries), folder)
    )
    return (folder / "unfinished.so").rename(library)


def undefined(path: Path) -> list[str]:
    """Symbols of an object file that Transformer Engine's or CUDA's libraries define."""
    table = subprocess.run(["nm", "--undefined-only", "-j", str(path)], capture_output=True, text=True, check=True)
    return [name for name in table.stdout.split() if LEFT_OUT.search(name)]


def stubs(names: list[str]) -> str:
    """C: a function for each, but for classes, whose type_info the bindings read, and whose tables they do not."""
    lines = ["extern void *_ZTVN10__cxxabiv117__class_type_infoE[];"]
    for name in names:
        if name.startswith(TYPE):
            lines.append(
                f"struct {{ void *table; const char *name; }} {name} = "
                f'{{&_ZTVN10__cxxabiv117__class_type_infoE[2], "{name.removeprefix(TYPE)}"}};'
            )
        else:
            lines.append(f"void *{name}[64];" if name.startswith(TABLE) else f"long {name}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def offered(library: Path) -> dict[str, Any]:
    """Functions: the first line that pybind11 writes into a docstring. Enums: value by name."""
    import torch  # noqa: F401  (the extension's libraries)

    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    everything = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    members = {name: getattr(value, "__members__", None) for name, value in everything.items()}
    return {
        "functions": {name: value.__doc__ for name, value in everything.items() if not isinstance(value, type)},
        "enums": {name: {key: int(one) for key, one in found.items()} for name, found in members.items() if found},
    }


if __name__ == "__main__":
    print(json.dumps(offered(compile_bindings(Path(sys.argv[1]).resolve()))))
