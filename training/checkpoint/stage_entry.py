"""How far a run with ``[[stage]]`` tables has come: into its checkpoints, and out of them when it starts."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from program.errors import UserError
from program.schema import JSON, structured
from training.checkpoint import folders
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.schedule_entry import kept_schedule
from training.checkpoint.start import first_of_all
from training.checkpoint.state import State, read_state
from training.config.checkpoint_config import CheckpointConfig
from training.config.run_config import RunConfig
from training.config.stage_config import RUN_BEGIN, BegunStage, RunPosition

ENTRY = "stages"
"""Among the entries of ``state.json``: the stages that have begun, with what was consumed before each."""
SEEN_S = 60.0
"""Seconds in which another node's checkpoint shows up on a network's file system."""


def noted(config: RunConfig) -> dict[str, JSON]:
    """The entry of a checkpoint of now."""
    return {} if config.begin is None else {ENTRY: [asdict(one) for one in config.begin.begun]}


def begun_stages(entries: Mapping[str, JSON]) -> tuple[BegunStage, ...]:
    """What ``noted`` wrote; empty where nothing of it can be read."""
    found, problems = structured(entries.get(ENTRY, []), tuple[BegunStage, ...])
    return () if problems else found


def tokens_of(entries: Mapping[str, JSON], consumed_samples: int, seq_length: int) -> int:
    """Tokens that a run has consumed, by a checkpoint's entries. seq_length: tokens of its newest samples."""
    begun = begun_stages(entries)
    if not begun:
        return consumed_samples * seq_length
    return begun[-1].tokens + (consumed_samples - begun[-1].samples) * seq_length


def position(root: Path, config: CheckpointConfig, iteration: int | None = None) -> RunPosition | None:
    """How far the run has come that a start now would continue; None where it continues none.

    iteration: that this very run has saved a moment ago, on whichever node. Only reads, so any rank may ask before it
    holds the run's folder. Raises UserError where ``config.load`` leads nowhere, and where the server of
    ``config.bucket`` does not answer.
    """
    if iteration is not None:
        return _of(_seen(root / folders.name_of(iteration)))
    with first_of_all(root, config) as path:
        if path is None:
            return None
        with contextlib.suppress(OSError, DamagedError, UserError):  # the start says so, and takes an older one
            return _of(read_state(path))
        reached = folders.iteration_of(path) or 0
        return RunPosition(now=replace(RUN_BEGIN, iteration=reached)) if reached else None


def _seen(path: Path) -> State:
    until_s = time.monotonic() + SEEN_S
    while True:
        try:
            return read_state(path)
        except (OSError, DamagedError, UserError):
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)


def _of(state: State) -> RunPosition:
    data, samples = state.entries.get("data"), state.progress.consumed_samples
    seq_length = data.get("seq_length") if isinstance(data, dict) else None
    tokens = tokens_of(state.entries, samples, seq_length if isinstance(seq_length, int) else 0)
    now = BegunStage(name="", iteration=state.progress.iteration, samples=samples, tokens=tokens)
    return RunPosition(now=now, begun=begun_stages(state.entries), schedule=kept_schedule(state.entries))
