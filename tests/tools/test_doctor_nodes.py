"""tools.doctor --nodes: what is broken on one node is found, and that node is named."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import together
from doctor_nodes import QUICK, can_mount, examine, free_port, left_out, srun, start
from tests.faults.private_links import links_possible
from tools.doctor.__main__ import main


def needs_mounts() -> None:
    if left_out(can_mount()):
        pytest.skip("needs private mounts (root)")


def in_own_mounts(command: str) -> list[str]:
    """Run what follows after ``command`` in mounts of its own."""
    return ["unshare", "--mount", "sh", "-c", f'{command} && exec "$@"', "sh"]


@pytest.mark.campaign
def test_healthy_nodes_are_measured_and_fold_into_one_line_each(tmp_path: Path) -> None:
    outcome = examine(tmp_path, 2, "--device", "cpu")
    assert outcome.code == 0, outcome.text
    assert outcome.bad == []
    assert "all 2 nodes, over the network" in outcome.text
    assert outcome.text.count("torch 2.13") == 1  # both nodes in one line
    speeds = {one["check"]: one["found"] for one in outcome.checks("collectives", "ok")}
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send and receive"} < set(speeds)
    assert "GB/s with a neighbour" in speeds["between nodes"]
    assert "exact;" in outcome.words("gemm", "ok")
    assert "2 nodes read each other's files" in outcome.words("run_dir", "ok")
    assert "one of all nodes won" in outcome.words("run_dir", "ok")
    assert "ms apart" in outcome.words("clocks", "ok")
    assert "no GPU here" in outcome.words("gpus", "not checked")  # never "ok"
    assert not list((tmp_path / "run").iterdir())  # what they wrote for each other is gone


def scenario_another_library_version_and_clocks_that_differ(tmp_path: Path) -> None:
    stub = tmp_path / "site/sentencepiece-9.9.9.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: sentencepiece\nVersion: 9.9.9\n")
    more, clocks = {1: {"PYTHONPATH": str(tmp_path / "site")}}, {2: "lambda: time.time() - 90"}
    outcome = examine(tmp_path, 3, "--only", "versions", "clocks", more=more, clocks=clocks)
    assert (outcome.code, outcome.bad) == (1, ["n2", "n3"])
    [wrong] = outcome.checks("versions", "wrong")
    assert wrong["nodes"] == ["n2"]
    assert wrong["found"] == "9.9.9"
    assert wrong["expected"].endswith("as on n1, n3")
    assert "bad node n2 (versions: sentencepiece between nodes)" in outcome.text
    assert "n3: between nodes: 90.0 s behind the first node" in outcome.words("clocks", "wrong")


@pytest.mark.campaign
def scenario_of_two_that_differ_the_first_is_right(tmp_path: Path) -> None:
    stub = tmp_path / "site/numpy-9.9.9.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    outcome = examine(tmp_path, 2, "--only", "versions", more={0: {"PYTHONPATH": str(tmp_path / "site")}})
    assert outcome.bad == ["n2"]


def scenario_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", free_port())) as taken:
        outcome = examine(tmp_path, 2, "--only", "port", port=taken.getsockname()[1])
    words = outcome.words("port", "wrong")
    assert (outcome.code, outcome.bad) == (1, ["n1"])
    assert "cannot be listened on: Address already in use; process" in words
    assert "python" in words
    assert "all 2 nodes" in outcome.text  # they have met on the next port


def names_of_slurm(folder: Path, count: int) -> dict[int, dict[str, str]]:
    """Variables for ``count`` nodes, n1 and so on, which ask a stand-in for scontrol."""
    (folder / "bin").mkdir()
    (folder / "bin/scontrol").write_text(f"#!/bin/sh\nseq -f n%g {count}\n")
    (folder / "bin/scontrol").chmod(0o755)
    names = {"SLURM_STEP_NODELIST": f"n[1-{count}]", "PATH": f"{folder}/bin:/usr/bin:/bin"}
    return dict.fromkeys(range(count), names)


def scenario_a_node_that_never_arrives_is_named(tmp_path: Path) -> None:
    more = names_of_slurm(tmp_path, 3)
    outcome = examine(tmp_path, 3, *QUICK, "--meeting_s", "8", absent=[2], more=more, first_comes_last=True)
    assert (outcome.code, outcome.bad) == (1, ["n3"]), outcome.text
    assert outcome.words("meeting", "wrong") == "n3: arrived: did not arrive within 8 s"
    assert "2 nodes read each other's files" in outcome.words("run_dir", "ok")  # the others were examined all the same


def scenario_where_the_first_node_does_not_come_the_others_say_so(tmp_path: Path) -> None:
    flags = ["--nodes", "--meeting_s", "0.1", "--time_limit_s", "3", "--only", "port"]
    process = start(srun(1, 2, free_port()), flags)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "doctor: n2: the first node (the node of rank 0) was not met: 127.0.0.1 port" in errors
    assert "connection refused" in errors


def scenario_a_run_dir_that_one_node_does_not_see_and_a_host_name_that_resolves_wrongly(tmp_path: Path) -> None:
    needs_mounts()
    (tmp_path / "run").mkdir()
    hidden = in_own_mounts(f"mount -t tmpfs none {tmp_path}/run")
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n10.99.99.99 {socket.gethostname()}\n")
    lying = in_own_mounts(f"mount --bind {tmp_path}/hosts /etc/hosts")
    outcome = examine(tmp_path, 3, "--only", "run_dir", "names", before={1: hidden, 2: lying})
    assert (outcome.code, outcome.bad) == (1, ["n2", "n3"])
    assert outcome.words("run_dir", "wrong").startswith("n2: shared by all nodes: does not see what n1, n3 wrote")
    assert "resolves to 10.99.99.99, which no interface of this machine has" in outcome.words("names", "wrong")


@pytest.mark.campaign
def scenario_clocks_that_are_before_and_behind(tmp_path: Path) -> None:
    outcome = examine(
        tmp_path, 3, "--only", "clocks", clocks={1: "lambda: time.time() - 90", 2: "lambda: time.time() + 5"}
    )
    assert (outcome.code, outcome.bad) == (1, ["n2"])
    assert "n3: between nodes: 5.0 s ahead of the first node" in outcome.words("clocks", "warning")


@pytest.mark.campaign
def scenario_a_setting_that_is_wrong_everywhere_excludes_no_node(tmp_path: Path) -> None:
    everywhere = {rank: {"GLOO_SOCKET_IFNAME": "ib7"} for rank in range(2)}
    outcome = examine(tmp_path, 2, "--only", "interfaces", more=everywhere)
    assert (outcome.code, outcome.bad) == (1, [])
    assert "GLOO_SOCKET_IFNAME: ib7: no interface ib7 is up here" in outcome.words("interfaces", "wrong")
    assert "something is wrong that excluding a node does not cure" in outcome.text
    one = examine(tmp_path, 2, "--only", "interfaces", more={1: {"NCCL_SOCKET_IFNAME": "=eth77"}})
    assert one.bad == ["n2"]


def has_carrier(network: str) -> bool:
    """Whether the cable is up in the kernel's eyes: it tells the second end of one up to a second after the first."""
    links = subprocess.run(["ip", "-n", network, "-br", "link"], capture_output=True, text=True, check=True).stdout
    return any(line.split()[1] == "UP" for line in links.splitlines())


def scenario_an_interface_that_one_node_lacks_is_not_waited_for(tmp_path: Path) -> None:
    outcome = examine(
        tmp_path, 2, "--only", "interfaces", "collectives", "--device", "cpu", more={1: {"GLOO_SOCKET_IFNAME": "nope0"}}
    )
    assert (outcome.code, outcome.bad) == (1, ["n2"])
    assert "nope0" in outcome.words("interfaces", "wrong")
    assert "the ranks of n2 would not find the others: see interfaces" in outcome.words("collectives", "not checked")


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable between 10.213.9.1 and 10.213.9.2."""
    if left_out(can_mount() and links_possible()):
        pytest.skip("needs root, iproute2 and the kernel's leave")
    names = [f"triplane{free_port()}{letter}" for letter in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        first, second = names
        subprocess.run(
            ["ip", "-n", first, "link", "add", "va", "type", "veth", "peer", "vb", "netns", second], check=True
        )
        for name, link, address in ((first, "va", 1), (second, "vb", 2)):
            subprocess.run(["ip", "-n", name, "addr", "add", f"10.213.9.{address}/24", "dev", link], check=True)
            for device in ("lo", link):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        while not all(has_carrier(name) for name in names):  # pytest's own limit ends it
            time.sleep(0.05)
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def on_machine(network: str, name: str, hosts: Path) -> list[str]:
    """Run what follows with a network, a host name and an /etc/hosts of its own."""
    inside = f'mount --bind {hosts} /etc/hosts && hostname {name} && exec "$@"'
    return ["nsenter", f"--net=/run/netns/{network}", "unshare", "--uts", "--mount", "sh", "-c", inside, "sh"]


def machines(tmp_path: Path, networks: tuple[str, str], own: str) -> dict[int, list[str]]:
    """na and nb; nb's own name leads to ``own``."""
    (tmp_path / "hosts_a").write_text("127.0.0.1 localhost\n10.213.9.1 na\n10.213.9.2 nb\n")
    (tmp_path / "hosts_b").write_text(f"127.0.0.1 localhost\n{own} nb\n10.213.9.1 na\n")
    return {
        0: on_machine(networks[0], "na", tmp_path / "hosts_a"),
        1: on_machine(networks[1], "nb", tmp_path / "hosts_b"),
    }


def scenario_the_loopback_trap(tmp_path: Path) -> None:
    with two_networks() as networks:
        before = machines(tmp_path, networks, own="127.0.1.1")
        few = ("--only", "names", "interfaces")
        outcome = examine(tmp_path, 2, *few, before=before, address="10.213.9.1")
        named = examine(tmp_path, 2, *few, before=before, address="10.213.9.1", more={1: {"GLOO_SOCKET_IFNAME": "vb"}})
    assert (outcome.code, outcome.bad) == (1, ["n2"]), outcome.text
    assert "n2: loopback: nb resolves to 127.0.1.1: ranks here are not reachable" in outcome.words("names", "wrong")
    routes = outcome.words("interfaces", "ok") + outcome.words("interfaces", "warning")
    assert "n1: route: va, MTU 1500" in routes
    assert "n2: route: vb, MTU 1500" in routes
    assert (named.code, named.bad) == (0, []), named.text


@pytest.mark.campaign
def scenario_a_node_whose_network_is_cut_is_named_and_its_log_says_why(tmp_path: Path) -> None:
    with two_networks() as networks:
        subprocess.run(["ip", "-n", networks[1], "link", "set", "vb", "down"], check=True)
        before = machines(tmp_path, networks, own="10.213.9.2")
        outcome = examine(
            tmp_path,
            2,
            *QUICK,
            *("--meeting_s", "5", "--time_limit_s", "15"),
            before=before,
            more=names_of_slurm(tmp_path, 2),
            address="10.213.9.1",
            first_comes_last=True,
        )
    assert (outcome.code, outcome.bad) == (1, ["n2"])
    assert outcome.words("meeting", "wrong") == "n2: arrived: did not arrive within 5 s"
    assert "doctor: n2: the first node (n1) was not met: 10.213.9.1 port" in outcome.errors
    assert "unreachable" in outcome.errors


def test_nodes_need_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes"], environ={}) == 2
    assert "found neither's variables" in capsys.readouterr().err


def scenario_a_step_of_one_node_is_examined_alone(tmp_path: Path) -> None:
    environ = srun(0, 1, free_port())
    process = start(environ, ["--nodes", "--only", "port", "--bad_nodes", str(tmp_path / "bad")])
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "is free on the first node" in text
    assert (tmp_path / "bad").read_text() == ""


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> together.Played:
    """Three at once: what is meant not to answer is waited for."""
    return together.play(request, 3, lambda name, scenario: scenario(tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", together.names(globals()))
def test_nodes(name: str, played: together.Played) -> None:
    played[name].result()
