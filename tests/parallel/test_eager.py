"""A CPU run loads no compiler, and nothing of it when its optimizer starts."""

import subprocess
import sys

CODE = """
import sys, torch
from parallel.cpu import adam, eager
compile = torch.compile
with eager.eager_imports():
    import training.train
    decorated = torch.compile(max), torch.compile(dynamic=True)(max)
assert torch.compile is compile and decorated == (max, max)
eager.install()
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = adam.FusedAdam([parameter], lr=0.5)
parameter.sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert parameter.max() < 1 and parameter.grad is None
print([name for name in ("torch._dynamo", "torch._inductor.compile_fx") if name in sys.modules])
"""


def test_a_run_on_the_cpu_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
