"""Runs in every process that the emulated device's environment reaches: after torch's import its CUDA kernels compute.

EMULATED_CUDA_HOOKS: modules, by commas, that are imported right after that.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AfterTorch(MetaPathFinder):
    """Finds torch once, with a loader that installs our operators behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        assert spec and spec.loader
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    library = ctypes.CDLL(os.environ["EMULATED_CUDA_OPERATORS"], mode=ctypes.RTLD_GLOBAL)
    library.emulated_cuda_install()
    for hook in filter(None, os.environ.get("EMULATED_CUDA_HOOKS", "").split(",")):
        importlib.import_module(hook)


if "EMULATED_CUDA_OPERATORS" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
