"""Cluster files: each is whole, what is wrong in one is named, and their variables are ones that are read today."""

import importlib.util
import mmap
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from models.costs.flops import peak_flops
from program.errors import UserError
from tools import clusters, nccl_env

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A cluster file that may be spoiled."""
    return Path(shutil.copy(clusters.FOLDER / "h100_ib.toml", tmp_path / "mine.toml"))


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.clusters", *arguments]
    return subprocess.run(command, cwd=ROOT, env={"PATH": "", **environ}, capture_output=True, text=True, check=False)


def test_there_is_a_file_for_every_fabric() -> None:
    assert {clusters.load(name).fabric.kind for name in clusters.known_clusters()} == {"infiniband", "efa", "ethernet"}
    assert len(clusters.known_clusters()) >= 5


@pytest.mark.parametrize("name", clusters.known_clusters())
def test_file_agrees_with_the_peaks_that_training_divides_by(name: str) -> None:
    gpu = clusters.load(name).gpu
    for dtype in ("fp32", "fp16", "bf16", "fp8"):
        ours = peak_flops(gpu.name, dtype)  # type: ignore[arg-type]
        assert ours == (gpu.peak_tflops[dtype] * 1e12 if dtype in gpu.peak_tflops else None)


@pytest.mark.parametrize("name", clusters.known_clusters())
def test_every_figure_has_its_source_or_meaning_beside_it(name: str) -> None:
    lines = (clusters.FOLDER / f"{name}.toml").read_text().splitlines()
    figures = [line for line in lines if re.match(r"(memory|cpus|scale_up_gb|scale_up_lat|nic|latency)\w* = ", line)]
    assert len(figures) == 9 and all("#" in line for line in figures)


@pytest.mark.parametrize("name", clusters.known_clusters())
def test_variables_are_read_by_todays_libraries(name: str) -> None:
    assert nccl_env.warnings(clusters.load(name).env, name) == []
    text = (clusters.FOLDER / f"{name}.toml").read_text()
    switched_off = re.findall(r"^# ([A-Z_]+) = ", text, re.MULTILINE)
    assert nccl_env.warnings(dict.fromkeys(switched_off, ""), name) == []


def test_exports_are_read_back_by_a_shell_and_what_is_set_already_wins() -> None:
    done = run("h100_efa", FI_PROVIDER="mine")
    assert done.returncode == 0 and done.stderr == ""
    script = f'{done.stdout}\nprintf "%s|%s" "$NCCL_SOCKET_IFNAME" "$FI_PROVIDER"'
    shell = subprocess.run(
        ["/bin/bash", "-c", script], env={"FI_PROVIDER": "mine"}, capture_output=True, text=True, check=True
    )
    assert shell.stdout == "^lo,docker,veth|mine"


def test_values_are_quoted_for_the_shell(copy: Path) -> None:
    copy.write_text(copy.read_text() + """NCCL_DEBUG_FILE = "a b; $(touch x) 'c'"\n""")
    done = run(str(copy))
    script = f'{done.stdout}\nprintf %s "$NCCL_DEBUG_FILE"'
    assert subprocess.run(["/bin/bash", "-c", script], capture_output=True, check=True).stdout == b"a b; $(touch x) 'c'"


def test_flags_for_sbatch() -> None:
    assert run("gb200", "--sbatch").stdout.split() == ["--ntasks-per-node=4", "--gpus-per-node=4", "--segment=16"]


def test_unknown_cluster_names_the_nearest() -> None:
    done = run("h100_infiniband")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cluster h100_infiniband: unknown. Did you mean" in done.stderr and "h100_ib" in done.stderr
    assert "Traceback" not in done.stderr


def test_yesterdays_variables_are_warned_of_with_todays_names(copy: Path) -> None:
    copy.write_text(copy.read_text() + 'NCCL_IB_CUDA_SUPPORT = "1"\n')
    done = run(str(copy), TORCH_NCCL_TRACE_BUFFER_SIZE="1", NCCL_TIMEOUT="1", NCCL_IB_TIMEOT="1", NCCL_VERSION="2")
    assert done.returncode == 0 and "export NCCL_IB_HCA=mlx5" in done.stdout
    assert "[env]: NCCL_IB_CUDA_SUPPORT is a name of yesterday; today it is NCCL_NET_GDR_LEVEL" in done.stderr
    assert "the environment: TORCH_NCCL_TRACE_BUFFER_SIZE is a name of yesterday; today it is TORCH_FR_" in done.stderr
    assert "NCCL_TIMEOUT" in done.stderr and "parallel.distributed_timeout_minutes" in done.stderr
    assert "NCCL_IB_TIMEOT is not read" in done.stderr and "Did you mean NCCL_IB_TIMEOUT?" in done.stderr
    assert "NCCL_VERSION" not in done.stderr
    assert run(NCCL_TIMEOUT="1").stderr.startswith("warning: the environment: NCCL_TIMEOUT"), "without a cluster, too"


@pytest.mark.parametrize(
    "before, after, expected",
    [
        (
            "gpus_per_node",
            "gpu_per_node",
            ["unknown key node.gpu_per_node", "gpus_per_node?", "gpus_per_node is missing"],
        ),
        ("[fabric]", "[fabrik]", ["unknown section fabrik. Did you mean fabric?", "fabric.kind is missing"]),
        ('kind = "infiniband"', 'kind = "token ring"', ['fabric.kind: expected "infiniband" or "efa" or "ethernet"']),
        ("nics_per_node = 8", "nics_per_node = 8.5", ["fabric.nics_per_node: expected a whole number, found 8.5"]),
        ("memory_gib = 79.6", "memory_gib = -1", ["gpu.memory_gib must be above 0, found -1."]),
        ("bf16 = 989.5", "bf61 = 989.5", ["gpu.peak_tflops.bf61: unknown number format. Known: bf16,"]),
        ("scale_up_domain = 8", "scale_up_domain = 12", ["fabric.scale_up_domain 12: expected whole nodes"]),
        ('NCCL_CROSS_NIC = "0"', "NCCL_CROSS_NIC = 0", ["env.NCCL_CROSS_NIC: expected a string, found 0"]),
        ("NCCL_CROSS_NIC = ", '"NCCL; rm" = ', ["env: 'NCCL; rm' is no name of a variable."]),
        ("[gpu]", "[gpu", ["not valid TOML"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(copy: Path, before: str, after: str, expected: list[str]) -> None:
    assert before in copy.read_text()
    copy.write_text(copy.read_text().replace(before, after))
    with pytest.raises(UserError) as raised:
        clusters.load(str(copy))
    for words in expected:
        assert words in str(raised.value)
    assert str(copy) in str(raised.value)


def test_no_prices_without_source_and_date() -> None:
    for name in clusters.known_clusters():
        price = clusters.load(name).price
        assert price.source and re.fullmatch(r"20\d\d-\d\d", price.date)


def test_comments_survive_as_toml() -> None:
    for path in clusters.FOLDER.glob("*.toml"):
        assert set(tomllib.loads(path.read_text())) == {"gpu", "node", "fabric", "price", "slurm", "env"}


def names_in(library: Path, pattern: bytes) -> set[str]:
    """Whole strings (between two zeros) of a library that match."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.finditer(pattern + rb"(?=\0)", content)
        return {match.group().decode() for match in found if content[match.start() - 1] == 0}


def library(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    found = [Path(place) / path for place in (spec.submodule_search_locations if spec else None) or []]
    if not found or not found[0].exists():
        pytest.skip(f"{package}/{path} is not installed: torch without CUDA, or NCCL of the system's")
    return found[0]


def test_list_of_names_is_that_of_the_installed_nccl() -> None:
    """tools/nccl_env.txt: where this fails after an update, write it again from these sets, and VERSIONS with it."""
    listed = {name for name in nccl_env.read_names() if name.startswith("NCCL_")}
    assert listed == names_in(library("nvidia.nccl", "lib/libnccl.so.2"), rb"NCCL_[A-Z0-9_]+")
    assert not [
        name for name in nccl_env.TODAY if name in listed and name not in ("NCCL_MIN_NRINGS", "NCCL_MAX_NRINGS")
    ]


def test_list_of_names_is_that_of_the_installed_torch() -> None:
    listed = {name for name in nccl_env.read_names() if name.startswith("TORCH_")}
    libraries = [library("torch", f"lib/libtorch_{part}.so") for part in ("cuda", "cpu")]
    assert listed == set().union(*(names_in(each, rb"TORCH_(?:NCCL|FR)_[A-Z0-9_]+") for each in libraries))
