"""docs/without_slurm.md and docs/kubernetes_job.yaml: their commands are ours, and their fields fit one another.

No Kubernetes is at hand: the Job itself is not run. tests/test_docs.py looks at the page's links and marks.
"""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel.local_ranks import STOPPED
from tools.plan.__main__ import main as plan
from tools.supervise.__main__ import run_dir_of, split
from tools.supervise.rule import BAD_INPUT

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/without_slurm.md").read_text()
PLANNER = (ROOT / "docs/planner.md").read_text()
COMMANDS = [
    line.partition(" #")[0]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if not line.startswith("#")
]
SERVICE, JOB = list[dict[str, Any]](yaml.safe_load_all((ROOT / "docs/kubernetes_job.yaml").read_text()))
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


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
    assert POD["terminationGracePeriodSeconds"] >= 300  # what the supervisor gives torchrun


def test_its_command_is_one_of_ours() -> None:
    (script,) = CONTAINER["args"]
    assert CONTAINER["command"] == ["sh", "-c"]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    words = shlex.split(script)
    assert words[:5] == ["exec", "python", "-m", "tools.supervise", "--"]
    at = words.index("--") + 1
    run_dir = run_dir_of([str(ROOT / word) if word.endswith(".toml") else word for word in words[at:]])
    mounted = [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]
    assert str(run_dir.parent) in mounted
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert words[words.index("--nproc-per-node") + 1] == str(gpus)
    assert {volume["name"] for volume in POD["volumes"]} == {mount["name"] for mount in CONTAINER["volumeMounts"]}


def test_commands_on_the_page_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    supervised = [shlex.split(line) for line in COMMANDS if "tools.supervise --" in line]
    assert [str(run_dir_of(split(words)[1])) for words in supervised] == ["runs/demo", "runs/llama3_8b"]


def test_the_simulation_on_the_planners_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (simulated,) = re.findall(r"^python -m tools\.plan (goodput .*)$", PLANNER, re.MULTILINE)
    assert plan(shlex.split(simulated)) == 0
    (shown,) = re.findall(r"```\n(16,384 GPUs.*?)```", PLANNER, re.DOTALL)
    assert shown in capsys.readouterr().out


def test_notice_commands_are_whole() -> None:
    notices = [shlex.split(line) for line in COMMANDS if line.startswith("--notice_command")]
    assert len(notices) == 4
    for flag, command in notices:
        assert flag == "--notice_command"
        subprocess.run(["sh", "-n", "-c", command], check=True)
