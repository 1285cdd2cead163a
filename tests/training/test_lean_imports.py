"""What a rank's imports leave out, and that it can be had later. A fresh interpreter: this one has imported all."""

import subprocess
import sys
from pathlib import Path

import pytest

import runs
from data.prepared import Prepared

CODE = """
import gc, sys
from training import lean_imports
with lean_imports.lean("cpu"):
    import training.train
    from megatron.core import timers
print([name for name in ("torch._dynamo", "torch._inductor.compile_fx", "wandb") if name in sys.modules])
assert gc.isenabled() and gc.get_freeze_count() > 100_000
import wandb
print(wandb.__name__)
"""


def test_a_run_on_the_cpu_imports_no_compiler_and_no_wandb() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "[]\nwandb\n", done.stdout + done.stderr


def test_a_forked_rank_imports_nothing_of_numpy_and_megatron(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would do it by itself, at its first step."""
    before, train = set(sys.modules), runs.one_run.train

    def observed(*args: object) -> int:
        code = train(*args)  # type: ignore[arg-type]
        late = sorted(name for name in sys.modules.keys() - before if name.startswith(("numpy", "megatron")))
        (tmp_path / "late").write_text(" ".join(late))
        return code

    monkeypatch.setattr(runs.one_run, "train", observed)
    runs.train(prepared, runs.configuration(tmp_path / "run", "--train.train_iters", "1"), 1)
    assert (tmp_path / "late").read_text() == ""
