"""checkpoint.load of another program's checkpoint: refused with the command that converts it, or converted once.

RUN_DIR/converted/recipe.toml          the run's configuration: what model the checkpoint is
RUN_DIR/converted/iter_0001000/        Triplane's checkpoint; has this name only when it is complete
RUN_DIR/converted/iter_0001000.json    from what it was converted, and how that ended
RUN_DIR/converted/iter_0001000.log     progress

tools.convert and tools.reshard do the work, as processes of their own: killed, they go on where they were.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from parallel.launch import Identity
from program.buckets.names import is_url
from program.durable import replace_file
from program.errors import UserError
from program.processes import die_with_parent
from program.untrusted import if_readable, read_json, read_text
from training.checkpoint.folders import checkpoints, is_complete, remove
from training.checkpoint.foreign import ForeignFolder, recognise
from training.checkpoint.foreign_model import check_before
from training.checkpoint.format.verify import damages
from training.checkpoint.start import has_own
from training.config.recipe import dump
from training.config.run_config import RunConfig

FOLDER, RECIPE = "converted", "recipe.toml"
WAIT_S = 1.0
"""Between looks of ranks that do not convert."""
_ROOT = Path(__file__).resolve().parents[2]


def with_converted(config: RunConfig, run_dir: Path, identity: Identity | None) -> RunConfig:
    """The configuration with a checkpoint.load that is ours. Raises UserError where it has to be converted before.

    A run that has checkpoints of its own continues them, whatever checkpoint.load says.
    """
    load = config.checkpoint.load
    if load is None or is_url(load) or has_own(checkpoints(run_dir), config.checkpoint):
        return config
    foreign = recognise(Path(load))
    target = run_dir / FOLDER / (foreign.path.resolve().name if foreign else Path(load).name)
    if foreign is None:
        if config.checkpoint.convert and not Path(load).exists() and is_complete(target):
            return _loading(config, target)  # the source is not needed any more
        return config
    _check_use(foreign, config)
    first = identity is None or identity.rank == 0
    recipe = run_dir / FOLDER / RECIPE
    if first:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        replace_file(recipe, dump(_with_absolute_paths(config)).encode())
    if not config.checkpoint.convert:
        raise UserError(
            f"checkpoint.load {load}: {foreign.description}. Convert it, and load the result, --checkpoint.load "
            f"{target}:\n  {foreign.command(target, recipe)}\nor let the run do so: --checkpoint.convert True"
        )
    warning = check_before(foreign, config)
    if first:
        if warning:
            print(warning, flush=True)
        _convert_once(foreign, target, recipe)
    else:
        _wait_for(target)
    return _loading(config, target)


def _loading(config: RunConfig, target: Path) -> RunConfig:
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=str(target)))


def _check_use(foreign: ForeignFolder, config: RunConfig) -> None:
    if foreign.has_weights_alone and not (config.checkpoint.finetune or config.checkpoint.no_load_optim):
        raise UserError(
            f"checkpoint.load {config.checkpoint.load}: {foreign.description}, of which the weights alone are read. "
            "Say so: --checkpoint.finetune True starts at iteration 0, --checkpoint.no_load_optim True goes on at the "
            "checkpoint's iteration; the optimizer's state starts fresh."
        )


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """A recipe in another folder means the same tokenizer."""
    path = Path(config.data.tokenizer).expanduser()
    if not path.exists():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(path.resolve())))


def _convert_once(foreign: ForeignFolder, target: Path, recipe: Path) -> None:
    """Make ``target``, unless it is there. Raises UserError where that fails, or it was made of something else."""
    note = target.with_name(f"{target.name}.json")
    source = {"source": str(foreign.path.resolve()), "kind": foreign.kind, "files": _fingerprint(foreign.path)}
    if is_complete(target):
        if _noted(note).get("from") != source:
            raise UserError(
                f"{target}: converted from {_noted(note).get('from', {}).get('source', 'something else')}, which is "
                f"not what {foreign.path} holds now. Remove it to convert that, or give its path to --checkpoint.load."
            )
        if not damages(target, "sizes"):  # hashes are compared by all ranks when it is loaded
            print(f"checkpoint.load: {foreign.path} was converted before: {target}", flush=True)
            return
    if target.exists():
        remove(target)
    log = target.with_name(f"{target.name}.log")
    print(f"checkpoint.load: converting {foreign.path} to {target}; progress is in {log}", flush=True)
    _write(note, {"from": source, "state": "converting"})
    arguments = foreign.arguments(target.resolve(), recipe.resolve())
    code = _run(arguments, log)
    _write(note, {"from": source, "state": "done" if code == 0 else "failed"})
    if code:
        raise UserError(f"checkpoint.convert: {foreign.path} was not converted. {_complaint(log, arguments[1], code)}")


def _run(arguments: list[str], log: Path) -> int:
    """The exit code."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environ,
            check=False,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    return done.returncode


def _complaint(log: Path, program: str, code: int) -> str:
    """The program's own message, all of its lines; where it has none, how it ended and what it said last."""
    said = "\n" + read_text(log).strip().replace("\r", "\n")
    _, found, message = said.rpartition(f"\n{program}: ")
    if found:
        return message
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{program} {how}; it said last: {said.rpartition(chr(10))[2]!r}. {log} has all of it."


def _wait_for(target: Path) -> None:
    """Until the first rank has made it. Raises UserError, after it has, where that failed."""
    note, began = target.with_name(f"{target.name}.json"), time.time()
    while True:
        said = _noted(note)
        if is_complete(target) and said.get("state") != "converting":
            return
        if said.get("state") == "failed" and note.stat().st_mtime >= began:
            raise UserError(f"checkpoint.convert: the first rank could not make {target}.")
        time.sleep(WAIT_S)


def _fingerprint(folder: Path) -> list[list[Any]]:
    """What tells one state of a folder from another: [name, bytes, changed]."""
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [[str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _noted(path: Path) -> dict[str, Any]:
    return if_readable(read_json, path, dict[str, Any]) or {}


def _write(path: Path, note: dict[str, Any]) -> None:
    replace_file(path, json.dumps(note).encode())
