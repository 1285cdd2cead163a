"""The recipes of published models: each is what the planner writes, and a run would accept it."""

import dataclasses
import re
from pathlib import Path

import pytest

from tools.plan.__main__ import main as plan
from training.cli.dry_run import describe
from training.config.recipe import load

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "slurm/recipes"
PLANNED = sorted(path.stem for path in FOLDER.glob("*.toml") if "Planned, not run." in path.read_text())
SHORT = {"llama32_1b_8gpus", "nemotron_h_8b"}


def head(name: str) -> tuple[int, str]:
    """GPUs, and the cluster's name."""
    found = re.match(r"# \w+ on ([\d,]+) x .*? \((\w+)\): ", (FOLDER / f"{name}.toml").read_text())
    assert found is not None, name
    return int(found[1].replace(",", "")), found[2]


def test_there_is_one_for_each_usual_model() -> None:
    assert {
        "llama32_1b_8gpus", "llama3_8b", "llama3_70b", "llama3_70b_512gpus", "llama31_405b", "qwen3_8b",
        "qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3", "deepseek_v3_gb200", "gpt_oss_120b", "gemma3_27b", "gpt3_175b",
        "olmo2_32b", "nemotron_h_8b",
    } == {*PLANNED}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_a_run_would_accept_it(name: str) -> None:
    num_gpus, _ = head(name)
    text = (FOLDER / f"{name}.toml").read_text()
    assert re.search(r"\n\[data\]\n(# paths = .*\n# tokenizer = .*|paths = .*\n(.*\n){2}tokenizer = .*)\n", text)
    config = dataclasses.replace(load(FOLDER / f"{name}.toml"), world_size=num_gpus, dry_run=True)
    assert f"# plan for {num_gpus:,} ranks: " in describe(config)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.campaign) for name in PLANNED]
)
def test_it_is_what_the_planner_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With itself for a base: what is not planned stays. Prices that change are to be written again."""
    monkeypatch.chdir(ROOT)
    num_gpus, cluster = head(name)
    path, again = FOLDER / f"{name}.toml", tmp_path / f"{name}.toml"
    fp8 = load(path).precision.fp8
    flags = ["--num_gpus", str(num_gpus), "--cluster", cluster, "--zero", "1", "--precision", "fp8" if fp8 else "bf16"]
    assert plan(["--recipe", str(path), *flags, "--write", str(again)]) == 0
    written = again.read_text().replace(str(again), f"slurm/recipes/{path.name}").splitlines()
    own = [line for line in path.read_text().splitlines() if not line.startswith("# Learning rate")]
    assert own == written, f"python -m tools.plan --recipe {path} {' '.join(flags)} --write {again}"
