"""python -m tests.gpu_path.warm: forked ranks of the emulated device train, or run one of checks/, one JSON request a
line.

Ranks on GPUs are new processes, since a forked child cannot use a CUDA that its parent has used. This parent imports
and never does, so on the emulated device a run of eight ranks begins without eight imports. It imports as a program for
GPUs does, and so cannot use tests/support/runs.py, which imports as one for CPUs.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client  # noqa: F401  (every run's first rank writes metrics.prom)

from parallel.lean_imports import lean

with lean("cuda"):
    from parallel import launch, local_ranks, mcore_patches, output
    from training import train
    from training.cli import parse
    from training.parts.run import PreparedRun
    from training.start.prepare import prepare, prepare_eval_tasks


def train_ranks(request: dict[str, Any]) -> int:
    """What pretrain_gpt.py does between its command line and its ranks' exit codes."""
    config = parse.parse_config(request["flags"])
    world_size = request["world_size"]
    parse.check(config, world_size)
    run_dir = Path(config.run_dir or "")
    output.make_run_dir(run_dir)
    tasks, prepared = prepare_eval_tasks(config, None), prepare(config, None)

    ready = PreparedRun(config=config, prepared=prepared, device="cuda", run_dir=run_dir, tasks=tasks)

    def rank(identity: launch.Identity) -> int:
        os.environ["RANK"] = str(identity.rank)  # for hooks
        with output.own_output(run_dir / "logs", identity, every_rank=True) as console_fd:
            return train.train(ready, identity, console_fd=console_fd)

    return ranks(world_size, rank)


def check_ranks(request: dict[str, Any]) -> int:
    """A module as ``python -m MODULE ARGUMENTS`` under torchrun."""
    world_size = request["world_size"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}

    def rank(identity: launch.Identity) -> int:
        os.environ |= {"RANK": str(identity.rank), "LOCAL_RANK": str(identity.rank)}
        module, *sys.argv[1:] = request["check"]
        runpy.run_module(module, run_name="__main__")
        return 0

    return ranks(world_size, rank)


def ranks(world_size: int, rank: Callable[[launch.Identity], int]) -> int:
    """The exit code."""
    code, failure = local_ranks.fork_ranks(world_size, rank)
    if failure is not None:
        print(f"rank {failure.rank}:\n{failure.text}\n{failure.notes}", file=sys.stderr)
    return code


def forked(request: dict[str, Any]) -> int:
    """The exit code of the request, in a process of its own with its environment; output goes to its file."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ.update(request["environ"])
        for hook in filter(None, os.environ["EMULATED_CUDA_HOOKS"].split(",")):
            importlib.import_module(hook)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT, 0o644) if "errors" in request else output
        os.dup2(output, 1)
        os.dup2(errors, 2)
        code = check_ranks(request) if "check" in request else train_ranks(request)
    except BaseException:
        traceback.print_exc()  # before any rank is there: a refusal, above all
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Until stdin ends."""
    mcore_patches.check_once()
    print("ready", flush=True)
    for line in sys.stdin:
        print(forked(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
