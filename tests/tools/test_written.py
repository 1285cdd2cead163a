"""No tool writes over what it did not write, nor into the folder of a run or a checkpoint but under its own names."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import runs
from data.prepared import Prepared
from program.errors import UserError
from tests.benchmarks.data import command as data_benchmark
from tests.benchmarks.step import command as step_benchmark
from tests.faults import document
from tools.convert.__main__ import main as convert
from tools.doctor import __main__ as doctor
from tools.evaluate import work
from tools.inspect_checkpoint.__main__ import main as inspect
from tools.plan.__main__ import main as plan
from tools.preprocess.__main__ import main as preprocess
from tools.report.__main__ import main as report
from tools.reshard.__main__ import main as reshard
from tools.shared.written import check_file, is_list_of_nodes, marked, write_file
from tools.supervise import decide


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations, and beside it files that are somebody's."""
    folder = tmp_path_factory.mktemp("written")
    config = runs.configuration(folder / "run", "--train.train_iters", "2", "--checkpoint.save_interval", "1")
    runs.train(prepared, config, 1)
    (folder / "own.txt").write_text("somebody's own\n")
    (folder / "own.json").write_text('{"results": {"somebody": "else"}}\n')
    (folder / "lines.txt").write_text("a line\n" * 50)
    return folder


PLAN = "--model llama3_8b --num_gpus 8 --global_batch_size 64".split()
ATTEMPT = "--run_dir run --exit_code 0".split()
REFUSED: list[tuple[Callable[[Sequence[str]], int], list[str]]] = [
    *((report, ["run", "--output", name]) for name in (
        "run/metrics.jsonl", "run/config.toml", "run/checkpoints/latest", "run/checkpoints/iter_0000001/state.json",
        "run/logs/page.html", "own.txt", "own.json",
    )),
    (report, ["run", "--bundle", "run/bundle.tar.gz"]),
    (doctor.main, ["--only", "port", "--json", "run/config.toml"]),
    (doctor.main, ["--only", "port", "--json", "own.json"]),
    (doctor.main, ["--only", "port", "--bad_nodes", "own.txt"]),
    (decide.main, [*ATTEMPT, "--exclude_file", "run/done"]),
    (decide.main, [*ATTEMPT, "--exclude_file", "own.txt"]),
    (plan, [*PLAN, "--report", "run/metrics.jsonl"]),
    (plan, [*PLAN, "--report", "own.txt"]),
    (plan, [*PLAN, "--write", "run/more.toml"]),
    (plan, ["backtest", "--output", "own.txt"]),
    (convert, ["export", "run", "run/hf"]),
    (convert, ["export", "run", "run/checkpoints/iter_0000001/hf"]),
    (reshard, ["run", "run/checkpoints/iter_0000009"]),
    (inspect, ["average", "run/checkpoints/mean", *(f"run/checkpoints/iter_000000{n}" for n in (1, 2))]),
    (preprocess, ["lines.txt", "--output", "run/metrics", "--tokenizer", "byte"]),
    (preprocess, ["train", "lines.txt", "--output", "run/t.model", "--vocab_size", "300"]),
    (step_benchmark.main, ["--output", "own.json"]),
    (data_benchmark.main, ["--output", "own.json"]),
    (data_benchmark.main, ["--output", "new.json", "--folder", "run"]),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "words"), REFUSED, ids=lambda one: " ".join(one) if type(one) is list else "")
def test_what_is_not_the_tool_s_is_left_alone(
    tool: Callable[[Sequence[str]], int], words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    try:
        assert tool(words) == 2
        said = capsys.readouterr().err
    except UserError as error:
        said = str(error)
    assert any(
        text in said for text in ("lies in a run's folder", "lies in a checkpoint's folder", "is not a file that")
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_its_own_file_is_written_again(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    for name in ("run/report.html", str(tmp_path / "page.html"), str(tmp_path / "b.tar.gz")):
        for _ in range(2):
            assert report(["run", "--bundle" if name.endswith("gz") else "--output", name]) == 0
    mine = tmp_path / "run/mine"  # a user's own folder in a run's is no part of the run
    shutil.copytree(run / "run", tmp_path / "run")
    mine.mkdir()
    assert report([str(tmp_path / "run"), "--output", str(mine / "page.html")]) == 0
    (tmp_path / "empty").touch()  # as mktemp leaves it
    for _ in range(2):
        decide.main([*ATTEMPT, "--exclude_file", str(tmp_path / "empty")])
        work.write(tmp_path / "run/scores.json", {"results": {}, "triplane_code": "x"})
    assert json.loads((tmp_path / "run/scores.json").read_text())["results"] == {}


def test_a_device_and_a_link_are_written_to_and_no_folder(tmp_path: Path) -> None:
    ours = marked("mine")
    write_file(Path("/dev/null"), b"mine", "--output", ours)
    assert Path("/dev/null").is_char_device()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", b"mine 2", "--output", ours)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "mine 2"
    with pytest.raises(UserError, match=r"--output .*: is no file"):
        write_file(tmp_path, b"mine", "--output", ours)
    assert is_list_of_nodes(b"n-1.cluster\ngpu_n2\n") and not is_list_of_nodes(b"[data]\npaths = 3\n")
    (tmp_path / "faults.md").write_text("# Another page\n")
    with pytest.raises(UserError, match="is not a file that this tool writes"):
        check_file(tmp_path / "faults.md", *document.PLACE)
