"""A run of pretrain_gpt.py itself goes from one ``[[stage]]`` to the next under srun, in one job step; each of its two
nodes copies its share of the checkpoints into a bucket.
"""

from pathlib import Path

import pytest

import buckets
from tests.faults.private_cluster import PrivateCluster
from tests.slurm.submission import REPO, checkout, run_job
from training.checkpoint.bucket import stored
from training.checkpoint.format.verify import damages
from training.metrics.jsonl import read_jsonl
from training.run_dir.history import read_history

PROGRAM = f"import runpy\nrunpy.run_path({str(REPO / 'pretrain_gpt.py')!r}, run_name='__main__')\n"
STAGES = """
[[stage]]
name = "first"
until_iterations = 2
[[stage]]
name = "longer"
until_iterations = 4
model.seq_length = 96
parallel.tensor_model_parallel_size = 2
"""
FLAGS = ("--log.tensorboard", "False", "--log.report", "False", "--checkpoint.async_save", "False")


@pytest.mark.slurm
@pytest.mark.campaign  # half a minute: imports, twice on two nodes, and SLURM
def test_srun_carries_a_run_through_a_change_of_stage(cluster: PrivateCluster, tmp_path: Path, cache_dir: Path) -> None:
    folder, recipe = checkout(tmp_path, PROGRAM), tmp_path / "staged.toml"
    debug = (REPO / "slurm/recipes/debug.toml").read_text()
    recipe.write_text(debug.replace("train_iters = 10\n", "").replace("nproc = 1\n", 'run_dir = "run"\n') + STAGES)
    url = f"s3://{buckets.BUCKET}/staged"
    arguments = (str(recipe), "--data.cache_dir", str(cache_dir), *FLAGS, "--checkpoint.bucket", url)
    with buckets.moto(tmp_path / "moto") as server, buckets.environment(server):
        job = run_job(cluster, folder, *arguments, flags=("--ntasks-per-node", "1"), **server.environment)
        there = [one for one in stored.stored(stored.root_of(url)) if one.is_complete]
        for one in there:
            (tmp_path / one.name).mkdir()
            stored.fetched(one, tmp_path / one.name, one.files)
            assert not damages(tmp_path / one.name, "hashes")
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0), job.output
    assert [one.name.partition("-")[0] for one in there] == ["iter_0000002", "iter_0000004"]
    second_node = (folder / "run/logs/node-n2.log").read_text()
    assert all(f"UploadReport(what='uploaded', name='iter_000000{number}'" in second_node for number in (2, 4))
    lines = [line for line in read_jsonl(folder / "run/metrics.jsonl") if "loss" in line]
    assert [(line["stage"], line["consumed_tokens"]) for line in lines] == [
        (1, 512), (1, 1024), (2, 1792), (2, 2560),
    ]  # fmt: skip
    events = read_history(folder / "run")
    begins = [one.fields for one in events if one.event == "begin"]
    places = [(one["nodes"], one["world_size"], one["layout"]) for one in begins]
    assert places == [(2, 2, "TP 1 x PP 1 x DP 2"), (2, 2, "TP 2 x PP 1 x DP 1")]
    assert [one.text("name") for one in events if one.event == "stage"] == ["first", "longer"]
    assert [one.iteration for one in events if one.event == "uploaded"] == [2, 4]
