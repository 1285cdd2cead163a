"""What a rank's imports leave out, and that it can be had later. A fresh interpreter: this one has imported all."""

import subprocess
import sys

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
