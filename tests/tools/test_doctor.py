"""tools.doctor on one machine, and how its parts judge what hardware tells that is not here.

The samples of nvidia-smi follow its manual page and published outputs (the query of fields, ``nvlink --status``), the
ones of InfiniBand the kernel's Documentation/ABI/stable/sysfs-class-infiniband, the ones of the kernel's log NVIDIA's
Xid catalogue. They were not recorded on our machines.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import param
from doctor_nodes import can_mount, left_out
from tools import clusters
from tools.doctor import collectives, gemm, gpus, infiniband, interfaces, nvidia_smi, nvlink, port, space, worker, xid
from tools.doctor.__main__ import main
from tools.doctor.context import DoctorContext, situation
from tools.doctor.deadline import within
from tools.doctor.finding import Finding, NodeCheck, NodeFacts, bad_nodes, deciding, fold, judged, shares_of_median

ROOT = Path(__file__).resolve().parents[2]


def a_situation(**changes: Any) -> DoctorContext:
    found = situation(False, {}, "cpu", None, 10.0, None)
    assert found is not None
    return dataclasses.replace(found, **changes)


def printed(findings: list[Finding], status: str) -> list[str]:
    return [f"{one.check}: {one.found.format(*one.numbers)}" for one in findings if one.status == status]


# One machine


@pytest.mark.parametrize("skipped", [("gemm", "collectives"), param(((),))], ids=["quick", "all"])
def test_one_machine_answers_with_a_line_per_check(
    skipped: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes are measured in test_doctor_nodes.py."""
    flags = ["--device", "cpu", "--run_dir", str(tmp_path / "run"), *(["--skip", *skipped] if skipped else [])]
    assert main([*flags, "--json", str(tmp_path / "report.json"), "--bad_nodes", str(tmp_path / "bad")]) == 0
    said = capsys.readouterr().out
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    status = {(one["group"], one["check"]): one["status"] for one in checks}
    assert status["versions", "pins"] == status["run_dir", "operations"] == "ok"
    if not skipped:
        assert status["gemm", "result"] == status["collectives", "all_reduce"] == "ok"
        assert "2 ranks, gloo" in said
    assert status["gpus", "nvidia-smi"] == status["xid", "kernel log"] == "not checked"
    assert (tmp_path / "bad").read_text() == ""
    assert max(map(len, said.splitlines())) <= 120
    assert list((tmp_path / "run").iterdir()) == []


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        (["--only", "versoins"], "--only versoins: unknown."),
        (["--cluster", "nowhere"], "cluster nowhere: unknown"),
        (["--time_limit_s", "-1"], "--time_limit_s must be above 0"),
    ):
        assert main(flags) == 2
        assert words in capsys.readouterr().err


def test_what_hangs_is_wrong_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, lambda: __import__("time").sleep(30))
    monkeypatch.setattr("tools.doctor.names.resolve", lambda _: __import__("time").sleep(60))
    assert main(["--only", "names", "port", "--time_limit_s", "1"]) == 1
    text = capsys.readouterr().out
    assert "no answer within 1 s; expected an answer" in text
    assert "port         not checked" in text


def test_little_room(tmp_path: Path) -> None:
    if left_out(can_mount()):
        pytest.skip("needs private mounts (root)")
    command = f"mount -t tmpfs -o size=1m,nr_inodes=64 none {tmp_path} && exec {sys.executable} -m tools.doctor"
    flags = f"--only space run_dir --run_dir {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{command} {flags}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "WRONG          run_dir " in done.stdout
    assert "0.00 GiB free of 0.00 GiB" in done.stdout
    assert "more files; expected 10,000" in done.stdout
    assert "(tmpfs)" in done.stdout


def test_a_run_dir_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--only", "run_dir", "--run_dir", str(tmp_path / "file")]) == 1
    assert "cannot be written: Not a directory" in " ".join(capsys.readouterr().out.split())


def test_room_is_judged_by_what_is_asked_for(tmp_path: Path) -> None:
    for free_gib, status in ((0.001, "ok"), (1e12, "wrong")):
        looked = space.check_node(a_situation(run_dir=tmp_path, free_gib=free_gib))
        assert looked.findings[0].status == status


# Findings


def test_nodes_that_agree_share_a_row_with_a_range_of_numbers() -> None:
    def speed(value: float) -> Finding:
        return Finding(group="gemm", check="speed", status="ok", found="{:.1f} TFLOP/s", numbers=(value,))

    rows = fold([("n1", speed(1.0)), ("n2", speed(3.0)), ("n3", judged("gemm", "speed", "wrong", "{0}"))], ["gemm"])
    assert [(row.nodes, row.found) for row in rows] == [(["n1", "n2"], "1.0 to 3.0 TFLOP/s"), (["n3"], "{0}")]


@pytest.mark.parametrize(
    "setting, nodes, reported, bad",
    [
        (False, ["n1", "n2"], 2, ["n1", "n2"]),
        (True, ["n1", "n2"], 2, []),
        (True, ["n2"], 2, ["n2"]),
        (True, ["n1"], 1, []),
    ],
)
def test_who_is_excluded(setting: bool, nodes: list[str], reported: int, bad: list[str]) -> None:
    finding = judged("a", "b", "wrong", "c", setting=setting)
    assert list(bad_nodes(fold([(node, finding) for node in nodes], []), reported)) == bad


def test_what_crosses_the_network_is_the_same_after_it() -> None:
    finding = Finding(group="a", check="b", status="ok", found="{:.0f}", numbers=(1.0,))
    seen = NodeFacts(rank=1, node="n2", host="h", machine="m", findings=[finding], facts={"a": {"x": [1]}})
    assert NodeFacts.from_json(json.loads(json.dumps(seen.to_json()))) == seen


def test_the_majority_decides_else_the_first() -> None:
    assert deciding(["b", "a", "a"]) == "a"
    assert deciding(["b", "a"]) == "b"
    assert deciding(["b", "a", "a", "c"]) == "b"
    assert shares_of_median({"x": 1.0, "y": 2.0, "z": 4.0}) == {"x": 0.5, "y": 1.0, "z": 2.0}


# GPUs

HEALTHY = "0, NVIDIA H100 80GB HBM3, GPU-aa, 570.86.15, 96.00.99.00.01, 81559, 4, 31, 1980, 0x0000000000000001, 700.00"
ILL = HEALTHY.replace("0, N", "1, N", 1).replace("aa", "bb").replace(" 31,", " 88,").replace("001,", "048,")
SMI = """#!/bin/sh
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.' >&2; exit 2;;
*mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.' >&2; exit 2;;
*query-remapped*) echo 'GPU-aa, 0, 0'; echo 'GPU-bb, 1, 0';;
*nvlink*) printf 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)\\n\\t Link 0: 26.562 GB/s\\n\\t Link 1: 26.562 GB/s\\n'
          printf 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)\\n\\t Link 0: 26.562 GB/s\\n\\t Link 1: <inactive>\\n';;
*) echo '{healthy}, 5, 16, 16, Enabled, 0, 0, No'
   echo '{ill}, 5, 8, 16, Enabled, 3, 2, [N/A]';;
esac
"""


@pytest.fixture
def stub_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi of two cards, the second ill, whose driver does not know two of the fields."""
    (tmp_path / "nvidia-smi").write_text(SMI.replace("{healthy}", HEALTHY).replace("{ill}", ILL))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("stub_smi")
def test_an_ill_card_is_named_with_everything_that_is_wrong() -> None:
    looked = gpus.check_node(a_situation(device="cuda", gpus=2))
    assert looked.facts == {"count": 2, "name": "NVIDIA H100 80GB HBM3", "driver": "570.86.15", "pcie_width": 8.0}
    assert printed(looked.findings, "ok") == [
        "count: 2 x NVIDIA H100 80GB HBM3, driver 570.86.15",
        "health: no uncorrected ECC errors, clocks not held down, 31 C",
    ]
    assert printed(looked.findings, "wrong") == [
        "ECC: GPU 1: 2 uncorrected errors",
        "clocks held down: GPU 1: hardware slow-down",
        "clocks held down: GPU 1: too hot (hardware)",
        "remapped rows: GPU 1: pending",
    ]
    assert printed(looked.findings, "warning") == [
        "ECC corrected: GPU 1: 3 corrected errors",
        "temperature: GPU 1: 88 C",
        "PCIe width: GPU 1: x8",
    ]
    looked = gpus.check_node(a_situation(device="cuda", gpus=8))
    assert "count: 2 x NVIDIA H100 80GB HBM3, driver 570.86.15" in printed(looked.findings, "wrong")


@pytest.mark.usefixtures("stub_smi")
def test_links_that_are_down() -> None:
    looked = nvlink.check_node(a_situation(device="cuda", gpus=2))
    assert printed(looked.findings, "wrong") == ["links: GPU 1: 27 GB/s"]
    assert nvidia_smi.link_speeds("GPU 0: NVIDIA H100 PCIe (UUID: GPU-6)\n") == {0: []}


def test_without_nvidia_smi_nothing_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert printed(gpus.check_node(a_situation(device="cuda", gpus=1)).findings, "wrong") == [
        "nvidia-smi: no nvidia-smi on the PATH"
    ]
    assert {one.status for one in gpus.check_node(a_situation()).findings} == {"not checked"}


def on(group: str, facts: Mapping[str, Any]) -> list[NodeFacts]:
    return [
        NodeFacts(rank=rank, node=node, host=node, machine=node, facts={group: one})
        for rank, (node, one) in enumerate(facts.items())
    ]


def test_nodes_with_other_cards_or_drivers() -> None:
    one = {"count": 8, "name": "NVIDIA H100 80GB HBM3", "driver": "570.86.15", "pcie_width": 16.0}
    seen = on("gpus", {"n1": one, "n2": {**one, "count": 7}, "n3": {**one, "driver": "550.54"}})
    found = [(node, one.check, one.status) for node, one in gpus.compare(seen)]
    assert found == [("n2", "count between nodes", "wrong"), ("n3", "driver between nodes", "warning")]


def test_hardware_errors_in_the_kernels_log() -> None:
    log = """
[   12.000000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15
[  100.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[200000.000000] NVRM: Xid (PCI:0000:5e:00): 48, pid=2417, name=python, DBE (Double Bit Error) ECC Error
[200001.000000] NVRM: Xid (PCI:0000:5e:00): 48, pid=2417, name=python, DBE (Double Bit Error) ECC Error
[200002.000000] NVRM: Xid (PCI:0000:5e:00): 31, pid=2417, name=python, Ch 00000008, MMU Fault
"""
    findings = xid.evaluate(log, uptime_s=200100.0)
    wrong = "kernel log: Xid 48 (double-bit ECC error) on PCI:0000:5e:00, 2 x, the last within a day"
    assert printed(findings, "wrong") == [wrong]
    assert printed(findings, "warning") == [
        "kernel log: Xid 79 (fell off the bus) on PCI:0000:3b:00, 1 x, the last more than a day ago"
    ]
    assert printed(xid.evaluate("", 1.0), "ok") == ["kernel log: no Xid of the hardware since boot"]


# Networks


def hca(root: Path, name: str, state: str = "4: ACTIVE", phys: str = "5: LinkUp", downed: int = 0) -> None:
    folder = root / name / "ports/1"
    (folder / "counters").mkdir(parents=True)
    for file, text in {
        "state": state,
        "phys_state": phys,
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        "counters/link_downed": str(downed),
        "counters/symbol_error": "0",
    }.items():
        (folder / file).write_text(f"{text}\n")


def test_infiniband_ports(tmp_path: Path) -> None:
    for node, state in (("n1", "4: ACTIVE"), ("n2", "1: DOWN"), ("n3", "4: ACTIVE")):
        hca(tmp_path / node, "mlx5_0", downed=3 if node == "n3" else 0)
        hca(tmp_path / node, "mlx5_1", state, "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
    here = a_situation(environ={"NCCL_IB_HCA": "=mlx5_0,mlx5_7"})
    looked = {node: infiniband.check_node(here, tmp_path / node) for node in ("n1", "n2", "n3")}
    assert printed(looked["n1"].findings, "ok") == ["ports: 2 of 2 ports active at 400 Gbit/s"]
    assert printed(looked["n1"].findings, "wrong") == ["NCCL_IB_HCA: names mlx5_7, which is not here"]
    assert printed(looked["n3"].findings, "warning") == ["error counters: mlx5_0:1: link_downed 3"]
    seen = on("infiniband", {node: one.facts for node, one in looked.items()})
    found = infiniband.compare(seen)
    assert [(node, one.check, one.found) for node, one in found] == [("n2", "mlx5_1:1", "DOWN (Disabled)")]
    lacking = infiniband.check_node(a_situation(cluster=clusters.load("h100_ib")), tmp_path / "n2")
    assert "active ports: 1" in printed(lacking.findings, "wrong")


@pytest.mark.parametrize(
    "variable, text, status",
    [
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "wrong"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth", "wrong"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "wrong"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", "wrong"),
    ],
)
def test_variables_that_choose_an_interface(variable: str, text: str, status: str) -> None:
    assert [one.status for one in interfaces.variables({variable: text}, ["eth0", "lo"])] == [status]


def test_a_port_of_the_range_for_outgoing_connections() -> None:
    looked = port.check_node(a_situation(master=("127.0.0.1", 50123)))
    assert [one.status for one in looked.findings] == ["warning"]
    assert port.refusal(70000) is not None


# Measurements


def test_gemm_tells_wrong_and_slow_cards() -> None:
    good = {"device": "H", "torch": "2", "nccl": "2.29", "tflops": 700.0, "digest": "aa", "exact": True}
    looked = gemm.evaluate([good, {**good, "exact": False}, {"error": "ended"}], a_situation(device="cuda"))
    assert [one.check for one in looked.findings if one.status == "wrong"] == ["result", "runs"]
    seen = on("gemm", {
        "n1": {"devices": [good, good]},
        "n2": {"devices": [good, {**good, "digest": "bb"}]},
        "n3": {"devices": [{**good, "tflops": 500.0}, {**good, "tflops": 600.0}]},
    })  # fmt: skip
    found = [(node, one.check, one.status, one.found) for node, one in gemm.compare(seen)]
    assert found == [
        ("n2", "same bits", "wrong", "GPU 1: other bits"),
        ("n3", "speed", "wrong", "GPU 0: 500 TFLOP/s, 71% of the median"),
        ("n3", "speed", "warning", "GPU 1: 600 TFLOP/s, 86% of the median"),
    ]
    slow = gemm.evaluate([{**good, "tflops": 350.0}], a_situation(device="cuda", cluster=clusters.load("h100_ib")))
    assert "speed: GPU 0: 350 TFLOP/s" in printed(slow.findings, "wrong")


def test_one_wrong_element_of_a_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert worker.is_exact(64, torch.float32, device)
    assert worker.is_exact(64, torch.bfloat16, device)
    right: Callable[..., torch.Tensor] = torch.Tensor.__matmul__

    def broken(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(left, other)
        if product.dtype == torch.bfloat16:
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    assert not worker.is_exact(64, torch.bfloat16, device)


def test_what_a_fabric_should_give() -> None:
    cluster = clusters.load("h100_ib")  # 450 GB/s NVLink, 8 cards of 50 GB/s a node
    expected = collectives.expected_gb_per_s
    assert expected("all_reduce", 8, 8, cluster) == 450
    assert expected("all_reduce", 8, 64, cluster) == 400
    assert expected("all_to_all", 8, 64, cluster) == pytest.approx(50 * 63 / 56)
    assert expected("send and receive", 8, 64, cluster) == 50
    assert expected("all_reduce", 4, 72, clusters.load("gb200")) == 900  # one domain of NVLink


def test_a_slow_node_is_told_from_its_neighbours() -> None:
    assert worker.pairings(2) == [{0: 1, 1: 0}]
    assert worker.pairings(4) == [{0: 1, 1: 0, 2: 3, 3: 2}, {1: 2, 2: 1, 3: 0, 0: 3}]
    for nodes in (3, 5, 8):
        rounds = worker.pairings(nodes)
        partners = [{one[node] for one in rounds if node in one} for node in range(nodes)]
        assert partners == [{(node + 1) % nodes, (node - 1) % nodes} for node in range(nodes)]
    whole = {"all_reduce": 100.0}
    speeds = {
        "n1": {"1": 40.0, "3": 39.0},
        "n2": {"0": 40.0, "2": 9.0},
        "n3": {"1": 9.0, "3": 8.0},
        "n4": {"2": 8.0, "0": 39.0},
    }
    facts = {node: {"ranks": [{"all": whole, "pairs": pairs}]} for node, pairs in speeds.items()}
    here = a_situation(device="cuda", names=("n1", "n2", "n3", "n4"))
    found = collectives.evaluate(on("collectives", facts), here, local=1)
    assert [(node, one.found) for node, one in found if one.status == "wrong"] == [("n3", "9 GB/s, 23% of the median")]


def test_an_echo_of_another_nodes_failure_is_no_finding_against_this_node() -> None:
    own: NodeCheck = collectives.check_node([{"rank": 0, "error": "ValueError: no device ib7"}])
    echo = collectives.check_node([{"rank": 1, "error": "RuntimeError: Connection closed by peer [10.0.0.1]:1"}])
    assert ([one.status for one in own.findings], [one.status for one in echo.findings]) == (
        ["wrong"],
        ["not checked"],
    )
