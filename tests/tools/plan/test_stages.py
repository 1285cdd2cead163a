"""The price of a run with ``[[stage]]`` tables is that of its stages."""

import re
from pathlib import Path

import pytest

from tools.plan.__main__ import main

RECIPE = """
[model]
shape = "llama3_8b"
seq_length = 4096
[train]
global_batch_size = 256
[parallel]
tensor_model_parallel_size = 2
[[stage]]
name = "pretrain"
until_tokens = 100_000_000_000
[[stage]]
name = "long"
until_iterations = 96_000
model.seq_length = 16384
train.global_batch_size = 64
parallel.context_parallel_size = 2
"""


def test_each_stage_costs_what_its_recipe_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "staged.toml"
    path.write_text(RECIPE)
    assert main(["stages", "--recipe", str(path), "--num_gpus", "64"]) == 0
    _, *rows, total = capsys.readouterr().out.splitlines()
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert found["pretrain"][0] == "95,368" and found["long"][0] == "632"  # 1e11 / 4096 / 256, rounded up
    assert "TP2 PP1 DP32 MBS1" in rows[0] and "TP2 PP1 CP2 DP16 MBS1" in rows[1]
    days = [float(row[4]) for row in found.values()]
    sums = re.search(r"96,000 iterations, 1.01e\+11 tokens, ([\d.]+) days .* ([\d,]+) USD at ([\d.]+) USD", total)
    assert sums and float(sums[1]) == pytest.approx(sum(days), rel=0.01)
    dollars = float(sums[2].replace(",", ""))
    assert dollars == pytest.approx(sum(days) * 24 * 64 * float(sums[3]), rel=0.01)
    # as the planner prices it alone
    asked = "--model llama3_8b --num_gpus 64 --global_batch_size 64 --seq_length 16384 --precision bf16".split()
    assert main([*asked, *"--tp 2 --pp 1 --vpp 1 --cp 2 --ep 1 --mbs 1 --top 1".split()]) == 0
    alone = capsys.readouterr().out
    assert re.search(rf"\b{re.escape(found['long'][3])}\b", alone), (found, alone)


def test_a_stage_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "staged.toml"
    path.write_text(RECIPE.replace("model.seq_length = 16384", "model.seq_length = 1048576"))
    assert main(["stages", "--recipe", str(path), "--num_gpus", "64"]) == 2
    assert 'stage "long": ' in capsys.readouterr().err
    path.write_text(RECIPE.partition("[[stage]]")[0])
    assert main(["stages", "--recipe", str(path), "--num_gpus", "64"]) == 2
    assert "has no [[stage]] tables" in capsys.readouterr().err
