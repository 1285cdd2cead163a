"""The emulated extension's functions and enums against the real one's bindings, compiled from its source.

A campaign's, since compiling takes half a minute; ``make prove-gpu-path`` puts the source into .te-extension.
"""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu_path.emulator import ROOT
from tests.gpu_path.te import enums, kernels
from tests.gpu_path.te.extension import PARTS

pytestmark = pytest.mark.timeout(600)  # of which compiling takes half a minute of a quiet machine
SOURCE = ROOT / ".te-extension"


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    assert SOURCE.is_dir(), "run `make te-extension`"
    command = [sys.executable, "-m", "tests.gpu_path.te.real", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def difference(documented: str, function: Callable[..., Any]) -> str:
    """How a function's parameters are not those that pybind11 documents, in words; "" where they are."""
    arguments = ast.parse("def " + re.sub(r"<[^>]*>", "None", documented.splitlines()[0]) + ": ...").body[0].args  # type: ignore[attr-defined]
    names = [one.arg for one in (*arguments.args, *arguments.kwonlyargs)]
    required = len(arguments.args) - len(arguments.defaults)
    own = list(inspect.signature(function).parameters.values())
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in own):
        return ""
    if len(names) != len(own):
        return f"takes {[one.name for one in own]}, not {names}"
    for place, (name, parameter) in enumerate(zip(names, own, strict=True)):
        if not re.fullmatch(r"arg\d+", name) and name != parameter.name:
            return f"calls {name} {parameter.name}"
        if place >= required and parameter.default is inspect.Parameter.empty:
            return f"has no default for {name}"
    return ""


@pytest.mark.campaign
def test_functions_have_the_real_ones_parameters(real: dict[str, Any]) -> None:
    for part in PARTS:
        importlib.import_module(f"tests.gpu_path.te.{part}")
    assert len(kernels.KERNELS) >= 36
    assert set(kernels.KERNELS) <= set(real["functions"])
    found = {name: difference(real["functions"][name], own) for name, own in kernels.KERNELS.items()}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.campaign
def test_enums_have_the_real_ones_values(real: dict[str, Any]) -> None:
    own = {name: {key: int(one) for key, one in getattr(enums, name).__members__.items()} for name in real["enums"]}
    assert own == real["enums"]


def test_another_parameter_is_seen() -> None:
    documented = "quantize(tensor: torch.Tensor, quantizer: object, output: object = None) -> object"
    assert difference(documented, lambda tensor, quantizer, output=None: None) == ""
    assert difference(documented, lambda tensor, quantizer: None).startswith("takes ['tensor', 'quantizer'], not")
    assert difference(documented, lambda tensor, output, quantizer=None: None) == "calls quantizer output"
    assert difference(documented, lambda tensor, quantizer, output: None) == "has no default for output"
