"""Transformer Engine on the emulated device: its own Python, from wheels in .te, over kernels in plain torch.

Import this module (a hook of the emulation) before anything imports transformer_engine or megatron.core. It takes the
place of transformer_engine_torch, the compiled extension, alone: modules, autograd functions, communication, recipes
and the optimizer are NVIDIA's code.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = Path(__file__).resolve().parents[3] / ".te"
"""Where the Makefile (.te/.ready) puts the wheels."""
NAME = "transformer_engine_torch"
EXPORT = "transformer_engine.pytorch.onnx_extensions"
"""Wants onnxscript, to export what is not exported here."""
PARTS = "quantization partial_cast gemm norms optimizer softmax attention moving router".split()


class Extension(ModuleType):
    """The module; what it lacks says so when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # a class, for annotations and isinstance
            found: Any = type(name, (), {})
        else:

            def found(*_: object, **__: object) -> None:
                raise NotImplementedError(f"{self.__name__}.{name} is not emulated (tests/gpu_path/te)")

        setattr(self, name, found)
        return found


def build() -> ModuleType:
    from tests.gpu_path.te import enums, kernels

    interpret_triton()
    module = Extension(NAME)
    for part in PARTS:
        importlib.import_module(f"tests.gpu_path.te.{part}")
    constants = {
        "get_cublasLt_version": lambda: 130200,  # of CUDA 13.0
        "get_cudnn_version": lambda: 91300,
        "get_num_cublas_streams": lambda: 4,
        "get_stream_priority_range": lambda *_: (0, -5),
        "ubuf_built_with_mpi": lambda: False,
        "device_supports_multicast": lambda *_: False,
        "get_grouped_gemm_setup_workspace_size": lambda *_: 1024,
    }
    classes = {name: value for name, value in vars(enums).items() if isinstance(value, type)}
    vars(module).update(**kernels.KERNELS, **constants, **classes)
    module.__all__ = [name for name in vars(module) if not name.startswith("_")]  # type: ignore[attr-defined]
    return module


def interpret_triton() -> None:
    """Its kernels run in Triton's own interpreter; a tuner that cannot time them takes the first of its choices."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = staticmethod(lambda _call, quantiles: [0.0] * len(quantiles))


LATENT_ROPE = "megatron.core.fusions.fused_mla_yarn_rope_apply"
PERMUTATION = "transformer_engine.pytorch.triton.permutation"
CROSS_ENTROPY = "transformer_engine.common.triton.cross_entropy"


class InPlaceOfTheExtension(MetaPathFinder):
    """Once transformer_engine.common is executed, its loader of the compiled extension gives this one; and the
    Triton kernels that interpreted are too slow for a training make way for plain torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("transformer_engine.common", LATENT_ROPE, PERMUTATION, CROSS_ENTROPY):
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec and spec.loader
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if fullname == LATENT_ROPE:
                from tests.gpu_path.te import latent_rope

                module.fused_apply_mla_rope_for_q = latent_rope.for_q  # type: ignore[attr-defined]
                module.fused_apply_mla_rope_for_kv = latent_rope.for_kv  # type: ignore[attr-defined]
                return
            if fullname == PERMUTATION:
                from tests.gpu_path.te import permutation

                vars(module).update({function.__name__: function for function in permutation.REPLACED})
                return
            if fullname == CROSS_ENTROPY:
                from tests.gpu_path.te import cross_entropy

                vars(module).update(cross_entropy.REPLACED)
                return
            module.load_framework_extension = lambda framework: sys.modules.setdefault(NAME, build())  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


assert (PACKAGES / "transformer_engine").exists(), f"no Transformer Engine in {PACKAGES}: run `make .te/.ready`"
sys.path.insert(0, str(PACKAGES))
sys.modules[EXPORT] = Extension(EXPORT)
sys.meta_path.insert(0, InPlaceOfTheExtension())
os.environ.setdefault("NVTE_TORCH_COMPILE", "0")  # Triton's compiler wants a GPU
os.environ.setdefault("TRITON_INTERPRET", "1")  # its interpreter does not
