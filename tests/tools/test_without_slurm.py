"""docs/without_slurm.md and docs/kubernetes_job.yaml: their commands are ours, and their fields fit one another.

No Kubernetes is at hand: the Job itself is not run. tests/test_docs.py looks at the page's links and marks.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel.failures import STOPPED
from tools.plan.__main__ import main as plan
from tools.supervise.rule import BAD_INPUT
from training.cli import parse
from waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/without_slurm.md").read_text()
PLANNER = (ROOT / "docs/planner.md").read_text()
COMMANDS = [
    line.partition(" #")[0]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if not line.startswith("#")
]
LOOP = "tools/supervise/loop.sh"
SERVICE, JOB = list[dict[str, Any]](yaml.safe_load_all((ROOT / "docs/kubernetes_job.yaml").read_text()))
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def run_dir_of(words: list[str]) -> str:
    """The folder that a loop around this command looks at."""
    assert (ROOT / words[0]).is_file() and words[0] == LOOP
    return str(parse.parse_config(words[words.index("pretrain_gpt.py") + 1 :]).run_dir)


def test_the_pods_find_one_another() -> None:
    nodes = JOB["spec"]["completions"]
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert JOB["spec"]["parallelism"] == nodes
    assert {"name": "NNODES", "value": str(nodes)} in CONTAINER["env"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert f"--master-addr {JOB['metadata']['name']}-0.{POD['subdomain']} " in CONTAINER["args"][0]


def test_exit_codes_mean_what_they_mean_here() -> None:
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert by_code == {BAD_INPUT: "FailJob", STOPPED: "Ignore"}
    named = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert named == {CONTAINER["name"]}
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]} in rules
    assert POD["restartPolicy"] == "Never"
    assert POD["terminationGracePeriodSeconds"] >= 300  # what the loop gives torchrun


def test_its_command_is_one_of_ours() -> None:
    (script,) = CONTAINER["args"]
    assert CONTAINER["command"] == ["sh", "-c"]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    words = shlex.split(script)
    assert words[0] == "exec"
    run_dir = run_dir_of([str(ROOT / word) if word.endswith(".toml") else word for word in words[1:]])
    mounted = [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    assert str(Path(run_dir).parent) in mounted
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert words[words.index("--nproc-per-node") + 1] == str(gpus)
    assert {volume["name"] for volume in POD["volumes"]} == {mount["name"] for mount in CONTAINER["volumeMounts"]}


def test_commands_on_the_page_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    looped = [shlex.split(line) for line in COMMANDS if line.startswith(LOOP) and line[-1] != "&"]
    assert [run_dir_of(words) for words in looped] == ["runs/demo", "runs/llama3_8b"]


def test_the_simulation_on_the_planners_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (simulated,) = re.findall(r"^python -m tools\.plan (goodput .*)$", PLANNER, re.MULTILINE)
    assert plan(shlex.split(simulated)) == 0
    (shown,) = re.findall(r"```\n(16,384 GPUs.*?)```", PLANNER, re.DOTALL)
    assert shown in capsys.readouterr().out


def test_a_notice_ends_the_loop(tmp_path: Path) -> None:
    """As the page has it, with a stand-in for the run and a file for the cloud's notice."""
    (block,) = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "notice()" in block]
    notices = [line for line in block.splitlines() if "notice()" in line]
    assert len(notices) == 4
    for one in notices:
        subprocess.run(["bash", "-n", "-c", one.lstrip("# ")], check=True)
    run = tmp_path / "run"
    (tmp_path / "saves.sh").write_text('trap "exit 75" TERM\ntouch "$RUN_DIR/started"\nwhile :; do sleep 0.05; done\n')
    script = block.replace("python pretrain_gpt.py slurm/recipes/demo.toml", f"bash {tmp_path}/saves.sh")
    script = script.replace("/shared/stop_soon", str(tmp_path / "stop_soon")).replace("sleep 5\n", "sleep 0.1\n")
    assert LOOP in script and "pretrain_gpt.py" not in script
    run.mkdir()
    environ = os.environ | {"RUN_DIR": str(run), "PYTHON": sys.executable}
    page = subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    until((run / "started").exists)
    (tmp_path / "stop_soon").touch()
    _, said = page.communicate(timeout=120)
    assert page.returncode == STOPPED, said
    assert "ended by SIGTERM; the same command continues" in said


def test_the_unit_is_one_of_systemds(tmp_path: Path) -> None:
    (unit,) = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)
    assert str(run_dir_of(shlex.split(unit.partition("ExecStart=/triplane/")[2].splitlines()[0]))) == "runs/llama3_8b"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    (tmp_path / "triplane.service").write_text(unit.replace("/triplane/tools", f"{ROOT}/tools"))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "triplane.service"], capture_output=True, text=True, timeout=60
    )
    assert [line for line in done.stderr.splitlines() if "triplane.service" in line] == []
