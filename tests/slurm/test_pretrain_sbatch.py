"""slurm/pretrain.sbatch on a real SLURM: how it starts ranks, by either launcher, and with what around them."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import together
from campaign import param
from tests.faults.private_cluster import PrivateCluster
from tests.slurm.submission import REPO, SCRIPT, TWO_BY_TWO, checkout, run_job

PLACE = """
import json, os, sys
from pathlib import Path
from parallel import launch
identity = launch.detect(os.environ)
launch.set_rendezvous(os.environ, identity)
seen = {
    "rank": identity.rank, "world_size": identity.world_size, "launcher": identity.launcher,
    "local_rank": identity.local_rank, "local_world_size": identity.local_world_size,
    "node": os.environ["SLURMD_NODENAME"], "arguments": sys.argv[1:], "cwd": os.getcwd(),
    "cpus": os.environ["SLURM_CPUS_PER_TASK"], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "master": os.environ["MASTER_ADDR"], "port": os.environ["MASTER_PORT"], "safe_path": "PYTHONSAFEPATH" in os.environ,
    "cache": os.environ["TRITON_CACHE_DIR"], "hca": os.environ.get("NCCL_IB_HCA"),
}
Path(f"rank-{identity.rank}.json").write_text(json.dumps(seen))
"""
"""Stands in for pretrain_gpt.py: finds its rank as that does, and notes what it sees."""


def test_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_missing_recipe_is_a_usage_error() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


@pytest.mark.slurm
def test_sbatch_accepts_the_script(cluster: PrivateCluster) -> None:
    for gpus in ("0", "2"):
        done = cluster.run("sbatch", "--test-only", *TWO_BY_TWO, "--gpus-per-node", gpus, str(SCRIPT), "recipe.toml")
        assert done.returncode == 0 and "to start at" in done.stdout, done.stdout


@pytest.mark.slurm
def test_sbatch_asks_for_eight_gpus_a_node_by_default(cluster: PrivateCluster) -> None:
    done = cluster.run("sbatch", "--test-only", *TWO_BY_TWO, str(SCRIPT), "recipe.toml")
    assert done.returncode != 0, "these nodes have 2 GPUs each"


def scenario_each_rank_of_srun_knows_its_place(cluster: PrivateCluster, tmp_path: Path) -> None:
    knows_its_place(cluster, tmp_path, "srun")


def scenario_each_rank_of_torchrun_knows_its_place(cluster: PrivateCluster, tmp_path: Path) -> None:
    knows_its_place(cluster, tmp_path, "torchrun")


def knows_its_place(cluster: PrivateCluster, tmp_path: Path, launcher: str) -> None:
    folder = checkout(tmp_path, PLACE)
    arguments = ("recipe.toml", "--data.paths", "a b")
    around = {"PYTHONSAFEPATH": "1", "SLURM_TMPDIR": "/tmp/of-the-job", "CLUSTER": "h100_ib"}
    job = run_job(cluster, folder, *arguments, flags=("--gpus-per-node", "2"), LAUNCHER=launcher, **around)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    first, second = sorted({rank["node"] for rank in seen})
    assert [(rank["rank"], rank["node"], rank["local_rank"]) for rank in seen] == [
        (0, first, 0), (1, first, 1), (2, second, 0), (3, second, 1),
    ]  # fmt: skip
    for rank in seen:
        assert (rank["launcher"], rank["world_size"], rank["local_world_size"]) == (launcher, 4, 2)
        assert rank["arguments"] == list(arguments) and rank["cwd"] == str(folder)
        assert rank["cpus"] == ("2" if launcher == "srun" else "4"), "half of a node's 4 CPUs; a task is a node's agent"
        assert rank["gpus"] == "0,1", "every rank sees its node's GPUs"
        assert rank["master"] == "127.0.0.1", "an address; names like n1 do not resolve"
        assert 20000 <= int(rank["port"]) < 30000 and rank["port"] == seen[0]["port"]
        assert not rank["safe_path"]
        assert rank["cache"].startswith("/tmp/of-the-job/"), "the node's own disk"
        assert rank["hca"] == "mlx5", "of slurm/clusters/h100_ib.toml"


@pytest.mark.campaign
def scenario_failing_rank_ends_the_others(cluster: PrivateCluster, tmp_path: Path) -> None:
    program = "import os, time\nif os.environ['SLURM_PROCID'] == '3': raise SystemExit(1)\ntime.sleep(600)"
    job = run_job(cluster, checkout(tmp_path, program), MAX_ATTEMPTS="1")
    assert (job.state, job.restarts) == ("FAILED", 0) and job.exit_code != 0, job.output


def scenario_python_and_settings_of_the_site_file_win(cluster: PrivateCluster, tmp_path: Path) -> None:
    program = "import os\nprint('fabric', os.environ['NCCL_IB_HCA'], os.environ['NCCL_CROSS_NIC'])"
    folder = checkout(tmp_path, program, interpreter="bin/python")
    (folder / "slurm").mkdir()
    (folder / "slurm/cluster.env").write_text(f'export NCCL_IB_HCA=mine NCCL_TIMEOUT=9 PATH="{folder}/bin:$PATH"\n')
    job = run_job(cluster, folder, CLUSTER="h100_ib")
    assert job.state == "COMPLETED" and job.output.count("fabric mine 0\n") == 4, job.output
    assert "warning: the environment: NCCL_TIMEOUT" in job.output


@pytest.mark.parametrize(
    "arguments, variables, words",
    [
        (("recipe.toml",), {"CLUSTER_ENV": "nowhere.env"}, "CLUSTER_ENV names nowhere.env"),
        (("recipe.toml",), {"CLUSTER": "h100"}, "cluster h100: unknown. Did you mean"),
        (("recipe.toml",), {"LAUNCHER": "mpirun"}, "LAUNCHER is srun or torchrun, found mpirun"),
        param((("resipe.toml",), {}, "resipe.toml: no such recipe. That folder has: recipe.toml")),
        (("recipe.toml", "--train.train_iter", "4"), {}, "--train.train_iters"),
    ],
)
def test_mistake_ends_the_job_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    """The batch shell itself, without SLURM: no command of SLURM's is reached."""
    folder = checkout(tmp_path, "print('ran')")
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "SLURM_SUBMIT_DIR": str(folder), **variables}
    done = subprocess.run(["bash", SCRIPT, *arguments], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and not (folder / "run").exists()


def scenario_container_of_apptainer_runs_ranks_and_tools(cluster: PrivateCluster, tmp_path: Path) -> None:
    """A stand-in for apptainer, which is not here: it notes its arguments and runs the command."""
    folder = checkout(tmp_path, "import os\nprint('inside', os.environ['IMAGE'])", interpreter="bin/python")
    fake = folder / "bin/apptainer"
    fake.write_text(
        '#!/bin/bash\n[ "$1 $2 $3 $4" = "exec --nv --bind $PWD,/data" ] || exit 9\nIMAGE=$7 exec "${@:8}"\n'
    )
    fake.chmod(0o755)
    (folder / "site.env").write_text(f'PATH="{folder}/bin:$PATH"\n')
    job = run_job(cluster, folder, CONTAINER="ngc.sif", MOUNTS="/data", CLUSTER_ENV="site.env")
    assert job.state == "COMPLETED" and job.output.count("inside ngc.sif\n") == 4, job.output


def scenario_job_that_may_have_one_or_two_nodes_uses_those_that_it_got(cluster: PrivateCluster, tmp_path: Path) -> None:
    program = "import os\nprint('one of', os.environ['SLURM_STEP_NUM_TASKS'])"
    keep = cluster.submit("--nodelist=n8", "--exclusive", "--wrap", "sleep 600", cwd=tmp_path)
    cluster.until(keep, lambda: cluster.show(keep)["JobState"] == "RUNNING")
    job = run_job(cluster, checkout(tmp_path, program), flags=("--nodes", "1-2", "--exclude", "n[1-6]"))
    cluster.run("scancel", str(keep))
    assert job.state == "COMPLETED" and job.output.count("one of 2\n") == 2, job.output


@pytest.mark.slurm
@pytest.mark.parametrize("name", together.names(globals()))
def test_jobs(name: str, played: together.Played) -> None:
    played[name].result()


def test_every_variable_is_explained() -> None:
    text = (REPO / "docs/slurm.md").read_text()
    named = SCRIPT.read_text().split("explains the variables\n# ")[1].split(".\n")[0]
    for name in named.replace("#", "").replace("\n", " ").split(","):
        assert f"`{name.strip()}`" in text
