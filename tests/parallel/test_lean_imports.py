"""What a rank's imports leave out, and that it can be had later. A fresh interpreter: this one has imported all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import gc, sys
from parallel import lean_imports
with lean_imports.lean("cpu"):
    import torch
    owners = torch, torch.cuda, torch.Tensor, torch.nn.Module
    before = [(owner, name, getattr(owner, name)) for owner in owners for name in dir(owner)]
    import tools.parity.probe, training.train
    from megatron.core import timers
    decorated = torch.compile(max), torch.compile(dynamic=True)(max)
from parallel.cpu.cuda_redirect import FACTORIES
changed = [(owner, name) for owner, name, value in before if getattr(owner, name) is not value]
changed = [(owner, name) for owner, name in changed if owner is not torch or name in FACTORIES]
assert not [pair for pair in changed if not pair[1].startswith("__")], changed
assert decorated == (max, max)
assert all(sys.modules[name] is None for name in lean_imports.TRANSFORMER_ENGINE)  # be it there or not
assert gc.isenabled() and gc.get_freeze_count() > 100_000
from parallel.cpu import adam, eager
eager.install()
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = adam.FusedAdam([parameter], lr=0.5)
parameter.sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert parameter.max() < 1 and parameter.grad is None
print([name for name in ("torch._dynamo", "torch._inductor.compile_fx", "wandb") if name in sys.modules])
assert torch.compile.__module__ == "torch"
import wandb
print(wandb.__name__)
"""


def test_a_run_on_the_cpu_imports_no_compiler_and_no_wandb() -> None:
    """Nor does its optimizer when it starts. Nor is torch another one: only ``groups.start`` installs the backend."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "[]\nwandb\n", done.stdout + done.stderr


RANK = """
import sys
from pathlib import Path

import pytest
import runs
from data.config import DataConfig
from data.prepare import prepare
prepared = prepare(DataConfig(tokenizer="byte", cache_dir=sys.argv[2]), lambda _: None)
before, train = set(sys.modules), runs.one_run.train
def observed(*args, **kwargs):
    code = train(*args, **kwargs)
    late = sorted(name for name in sys.modules.keys() - before if name.startswith(("numpy", "megatron")))
    Path(sys.argv[1], "late").write_text(" ".join(late))
    return code
runs.one_run.train = observed
runs.train(prepared, runs.configuration(Path(sys.argv[1], "run"), "--train.train_iters", "1"), 1)
"""


@pytest.mark.campaign
def test_a_forked_rank_imports_nothing_of_numpy_and_megatron(tmp_path: Path, cache_dir: Path) -> None:
    """Each would do it by itself, at its first step."""
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
    command = [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path), str(cache_dir)]
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    assert (tmp_path / "late").read_text() == ""
