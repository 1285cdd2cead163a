"""The file by which a batch script tells bad input from what Python itself means with exit code 2."""

import sys
from pathlib import Path

import pytest

from campaign import param
from programs import Program
from training.watchdog.exit_code_file import EXIT_CODE_FILE, exit_code_file

QUIET_RANK = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
"""Of srun: it waits for the node's first rank to show what both have found."""


@pytest.mark.parametrize(
    "arguments, variables",
    [
        (("--train.train_itres", "4"), {}),
        (("--train.train_iters", "many"), {}),
        (("nowhere.toml",), {}),
        param((("nowhere.toml",), QUIET_RANK)),
        (("slurm/recipes/debug.toml", "--parallel.tensor_model_parallel_size", "3", "--nproc", "3"), {}),
        (("slurm/recipes/debug.toml", "--data.paths", "nowhere", "--device", "cpu", "--nproc", "2"), {}),
    ],
)
def test_every_mistake_leaves_the_file(tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    code_file = tmp_path / "exit_code"
    code_file.touch()
    flags = [*arguments, "--run_dir", str(tmp_path / "run")]
    program = Program(flags, tmp_path / "said", {**variables, EXIT_CODE_FILE: str(code_file)})
    _, said = program.communicate()
    assert (program.returncode, code_file.read_text()) == (2, "2\n"), said


def test_what_is_no_mistake_leaves_none(tmp_path: Path) -> None:
    code_file = tmp_path / "exit_code"
    program = Program(["--help"], tmp_path / "said", {EXIT_CODE_FILE: str(code_file)})
    program.communicate()
    assert program.returncode == 0 and not code_file.exists()


def test_a_rank_takes_nothing_away_from_the_file_of_another(tmp_path: Path) -> None:
    """Ended between emptying the file and writing to it, it would: the batch script found an empty file once."""
    code_file = tmp_path / "exit_code"
    code_file.write_text("2\n")
    with pytest.raises(SystemExit), exit_code_file({EXIT_CODE_FILE: str(code_file)}):
        sys.exit(2)
    assert code_file.read_text() == "2\n2\n"
