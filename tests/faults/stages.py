"""Random runs through ``[[stage]]`` tables, killed at random moments and started again in other layouts.

A case is the seed of a plan: python -m tests.faults --only stages --seed N does "plan 0", "plan 1" and so on.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from tests.faults import program
from tests.faults.kills import chosen
from tests.faults.processes import all_gone, family, kill
from tests.faults.recorded_samples import CALLBACK, recorded
from tests.faults.results import CaseResult, Store
from tests.faults.stage_plans import SHAPES, StagePlan, drawn, flags_of, write_texts
from training.checkpoint import folders
from training.checkpoint.state import read_state
from training.metrics.jsonl import read_jsonl
from training.run_dir.history import read_history

CAMPAIGN = "stages"
TITLE = "Stages, killed at random moments"
TEXT = """A recipe is drawn: 2 to 4 `[[stage]]` tables, each until so many iterations, samples or tokens, with blends or
streams, lengths of samples, batches, curves and layouts that change, and ranges of samples and iterations that are
skipped. It runs once undisturbed. Then it runs again: two to four times a rank, the launcher or all of them get SIGKILL
at a random moment, between two stages and while a stage starts too, and it is started again, each time in another
layout of two ranks where the stages have none of their own. At its end it must have taken the same samples, window by
window, with the same learning rates and counters, and, in fp32, losses within 2e-5 (relative) of the undisturbed ones.
"Seen" is how many kills were in how many stages."""
BOUND = 2e-5
"""Of losses, relative: tests/training/start/test_stages.py has the same."""
LIMIT_S = 120.0
"""Whatever takes longer hangs."""
VICTIMS = ("rank 0", "rank 1", "the launcher", "all processes")


def cases(count: int) -> list[str]:
    """``count`` plans."""
    return [f"plan {number}" for number in range(count)]


def run(todo: Sequence[str], store: Store, scratch: Path, printed: Callable[[], None]) -> None:
    """Do the cases."""
    program.import_once(scratch / "cache")
    write_texts(scratch)
    for case in todo:
        store.add(one(f"{store.seed} {case}", case, scratch, scratch / case.replace(" ", "-")))
        printed()


def one(seed: str, case: str, texts: Path, folder: Path, most: int = 4) -> CaseResult:
    """A plan of at most so many stages, undisturbed and disturbed; the folder stays where something is wrong."""
    folder.mkdir()
    began, plan, draw = time.monotonic(), drawn(seed, f"{texts}/{{}}.jsonl", folder, most), Random(f"{seed} disturbed")
    whole, run_dir = folder / "undisturbed", folder / "run"
    problems, outcome = to_its_end(plan, whole, 2 if plan.own_layouts else 1), "undisturbed only"
    problems = problems or miscounted(plan, whole)
    if not problems:
        kills, met = 0, set[int]()
        for _ in range(draw.randint(2, 4)):
            killed, stage = disturbed(plan, run_dir, draw)
            kills += killed
            met |= {stage} if killed else set()
        problems = to_its_end(plan, run_dir, 2, *layout(plan, draw)) or differences(whole, run_dir)
        outcome = f"the same after {kills} kills in {len(met)} stages"
    if not problems:
        shutil.rmtree(folder)
    seconds, problem = time.monotonic() - began, "; ".join(problems)
    return CaseResult(campaign=CAMPAIGN, case=case, kind=plan.kind, outcome=outcome, seconds=seconds, problem=problem)


def layout(plan: StagePlan, draw: Random) -> list[str]:
    """Flags of a start: a layout, where stages have none."""
    return [] if plan.own_layouts else flags_of(draw.choice([*SHAPES]))


def start(plan: StagePlan, run_dir: Path, nproc: int, *flags: str) -> int:
    """The run, again: its launcher's pid."""
    run_dir.mkdir(exist_ok=True)
    place = ("--run_dir", str(run_dir), "--nproc", str(nproc), "--train.callbacks", CALLBACK)
    argv = [str(program.ROOT / "pretrain_gpt.py"), str(plan.recipe), *place, *flags]
    return program.start(argv, run_dir / "console.log")


def to_its_end(plan: StagePlan, run_dir: Path, nproc: int, *flags: str) -> list[str]:
    """Let it train to its end: what is wrong."""
    code = program.finish(start(plan, run_dir, nproc, *flags))
    if code or not (run_dir / "done").exists():
        return [f"expected exit code 0 and the end, found {code}: {(run_dir / 'console.log').read_text()[-1500:]}"]
    return []


def disturbed(plan: StagePlan, run_dir: Path, draw: Random) -> tuple[bool, int]:
    """A start that is killed at a random moment: whether it was, before its end, and in which stage."""
    pid = start(plan, run_dir, 2, *layout(plan, draw))
    done, more = iterations(run_dir), draw.randrange(7)
    deadline = time.monotonic() + (draw.uniform(0, 8) if draw.random() < 0.4 else LIMIT_S)
    while iterations(run_dir) < done + more and is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.2))
    processes, victim = family(pid), draw.choice(VICTIMS)
    alive = is_alive(pid)
    there = "all processes" if victim.startswith("rank") and int(victim[-1]) >= len(processes.ranks) else victim
    kill(chosen(processes, there))
    program.finish(pid)
    assert all_gone(processes.all(), LIMIT_S), f"left behind by {victim}"
    return alive, sum(event.event == "stage" for event in read_history(run_dir))


def is_alive(pid: int) -> bool:
    """Whether a child has not ended."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def trained(run_dir: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics by iteration; of one that ran twice, the later."""
    path = run_dir / "metrics.jsonl"
    return {line["iteration"]: line for line in read_jsonl(path) if "loss" in line} if path.exists() else {}


def iterations(run_dir: Path) -> int:
    """How many have a line."""
    return len(trained(run_dir))


def miscounted(plan: StagePlan, run_dir: Path) -> list[str]:
    """Iterations that have passed another number of samples than lie before the last one that they took."""
    problems, position, taken = [], 0, 0
    for number, line in trained(run_dir).items():
        while taken < line["consumed_samples"]:
            taken += position not in plan.skipped
            position += 1
        if line.get("samples_skipped", 0) != position - taken:
            problems.append(f"iteration {number}: expected {position - taken} skipped samples, found {line}")
    return problems[:1]


COUNTERS = (
    "learning_rate", "batch_size", "consumed_samples", "consumed_tokens", "stage", "skipped", "samples_skipped",
    "iterations_skipped",
)  # fmt: skip


def differences(whole: Path, run_dir: Path) -> list[str]:
    """Between a run that was not disturbed and one that was."""
    expected, found = trained(whole), trained(run_dir)
    if expected.keys() != found.keys():
        return [f"expected {len(expected)} iterations, found {sorted(found)}"]
    problems = []
    for name in COUNTERS:
        wrong = [number for number, line in expected.items() if line.get(name) != found[number].get(name)]
        problems += [f"{name} differs in iterations {wrong}"] if wrong else []
    losses, again = (np.array([line["loss"] for line in lines.values()]) for lines in (expected, found))
    if (apart := np.max(np.abs(again / losses - 1))) > BOUND:
        problems.append(f"losses differ by {apart:.1e}, at most {BOUND:g} expected")
    samples, taken = recorded(whole), recorded(run_dir)
    if samples != taken:
        first = next((n for n, pair in enumerate(zip(samples, taken, strict=False)) if pair[0] != pair[1]), len(taken))
        problems.append(f"other samples, from consumed sample {first} of {len(samples)} on")
    orders = [read_state(folders.complete(one / "checkpoints")[-1]).entries["order"] for one in (whole, run_dir)]
    return problems + (["the order in the last checkpoint differs"] if orders[0] != orders[1] else [])
