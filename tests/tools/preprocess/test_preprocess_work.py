"""Killed and continued, several at once, full disks, shuffled, joined, verified."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from campaign import param
from data.inputs import resolve
from data.manifest import BLOCK_BYTES, BlockSums
from data.shards import Shard
from program.errors import UserError
from tests.tools.preprocess_program import process, results, shard_bytes, wait_for_end
from tools.preprocess import worker_pool
from tools.preprocess.__main__ import main

FORK = multiprocessing.get_context("fork")


def run(*arguments):
    return main([str(one) for one in arguments])


def documents(prefix):
    """Every document of all shards of a prefix, as tuples of ids."""
    found = []
    for one in resolve((str(prefix),)).prefixes:
        shard = Shard(one)
        found += map(tuple, np.split(shard.tokens.tolist(), np.cumsum(shard.document_lengths())[:-1]))
    return found


def forked(command):
    """The program in a process of its own, at once: everything is imported already."""
    worker = FORK.Process(target=lambda: os._exit(run(*command)))
    worker.start()
    return worker


def published(folder):
    """Files that have their names, work units of a run that goes on among them."""
    return {path for path in folder.rglob("*") if path.is_file() and ".tmp-" not in path.name}


def killed_when(is_time, delay_s, folder, command):
    """Start the program and kill it with -9 a moment after it is time: whether it was at work. Its workers end with
    it: nothing comes after them."""
    import psutil

    started = forked(command)
    while started.is_alive() and not is_time():
        time.sleep(0.0005)
    time.sleep(delay_s)
    is_at_work = started.is_alive()
    workers = psutil.Process(started.pid).children() if is_at_work else []
    started.kill()
    started.join()
    wait_for_end(workers)
    found = published(folder)
    time.sleep(0.02)
    assert published(folder) == found
    return is_at_work


def kills(draw, folder, stage, count, of):
    """`count` times to kill it, spread over a stage of `of` shards, named `stage`: how many of them are there then."""
    for number in range(count):
        goal = int((number + draw.random()) * of / (count + 1))  # not at the very end, when it may end first
        yield lambda goal=goal: len(list(folder.glob(f"{stage}-*.idx"))) >= goal, draw.uniform(0, 0.01)


def joining(draw, target, count):
    """`count` times to kill it, while it writes the shard of all."""
    for _ in range(count):
        yield lambda: any(target.parent.glob(f"{target.name}.bin.tmp-*")), draw.uniform(0, 0.003)


@pytest.mark.parametrize("flags, seed", [param(((), 1)), (("--merge", "--shuffle_docs", 7), 2)])
def test_killed_at_random_points_gives_the_bytes_of_an_uninterrupted_run(
    lines, sentencepiece_model, tmp_path, flags, seed
):
    """Points of every stage."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    source = tmp_path / "much.jsonl"
    source.write_bytes(lines.read_bytes() * 2)
    command = (source, "--tokenizer", sentencepiece_model, "--unit_mb", 0.03, "--workers", 2, *flags)
    whole = forked((*command, "--output", tmp_path / "whole" / "x"))
    whole.join()
    assert whole.exitcode == 0
    shards = json.loads((tmp_path / "whole/x.preprocess/totals.json").read_text())["shards"]
    draw, folder = random.Random(seed), tmp_path / "killed"
    work, target = folder / "x.preprocess", folder / "x_text_document"
    times = list(kills(draw, folder, "x", 4, shards))
    if flags:
        times = [
            *kills(draw, work, "unit", 3, shards),
            *kills(draw, work, "mixed", 2, shards),
            *joining(draw, target, 1),
        ]
    stages = []
    for is_time, delay_s in times:
        if not killed_when(is_time, delay_s, folder, (*command, "--output", folder / "x")):
            break
        for path in folder.glob("x*.idx"):  # what has its name is whole
            Shard(path.with_suffix(""))
        units = len(list(folder.glob("x-*.idx") if not flags else work.glob("unit-*.idx")))
        stages.append((units, len(list(work.glob("mixed-*.idx"))), any(folder.glob(f"{target.name}.bin.tmp-*"))))
    in_units = [units for units, mixed, _ in stages if 0 < units < shards and not mixed]
    in_shuffling = [mixed for _, mixed, _ in stages if 0 < mixed < shards]
    assert len(set(in_units)) > 1, stages
    assert not flags or (in_shuffling and any(is_joining for *_, is_joining in stages)), stages
    assert run(*command, "--output", folder / "x") == 0
    assert results(folder) == results(tmp_path / "whole")
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_workers_end_with_a_killed_parent_and_a_restart_is_not_refused(lines, sentencepiece_model, tmp_path):
    import psutil

    source = tmp_path / "much.jsonl"
    source.write_bytes(lines.read_bytes() * 3)
    command = (source, "--output", tmp_path / "x", "--tokenizer", sentencepiece_model, "--workers", 2, "--unit_mb", 0.4)
    started = process(*command)
    while len(workers := psutil.Process(started.pid).children()) < 2:
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    again = process(*command)
    wait_for_end(workers)
    err = again.communicate()[1]
    assert again.returncode == 0, err
    assert len(documents(tmp_path / "x")) == 360


@pytest.mark.campaign
def test_a_killed_worker_is_said_and_continued(lines, sentencepiece_model, tmp_path):
    import psutil

    source = tmp_path / "much.jsonl"
    source.write_bytes(lines.read_bytes() * 3)
    command = (source, "--output", tmp_path / "x", "--tokenizer", sentencepiece_model, "--workers", 2, "--unit_mb", 0.4)
    started = process(*command)
    while not (workers := psutil.Process(started.pid).children()):
        time.sleep(0.02)
    workers[0].kill()
    err = started.communicate()[1]
    assert started.returncode == 1
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("preprocess: the worker of unit ") and "was killed by SIGKILL" in last
    assert run(*command) == 0


def test_a_worker_that_dies_before_its_first_task_is_said_too(monkeypatch):
    """Its pipe is broken then: no reason for a traceback."""
    give = worker_pool._give
    monkeypatch.setattr(worker_pool, "_worker", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(
        worker_pool, "_give", lambda worker, *more: connection.wait([worker], 60) and give(worker, *more)
    )
    with pytest.raises(RuntimeError, match="the worker of unit 7 was killed by SIGKILL"):
        worker_pool.work(
            [7], lambda *_: None, lambda _: None, 1, worker_pool.progress(1, "x"), (), worker_pool.StopSign()
        )


def test_a_request_to_stop_ends_with_75_and_is_continued(lines, sentencepiece_model, tmp_path):
    import psutil

    source = tmp_path / "much.jsonl"
    source.write_bytes(lines.read_bytes() * 3)
    command = (source, "--output", tmp_path / "x", "--tokenizer", sentencepiece_model, "--workers", 1)
    started = process(*command)
    while not psutil.Process(started.pid).children():
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    assert "the same command continues" in started.communicate()[1]
    assert started.returncode == 75
    assert run(*command) == 0


def test_two_at_once_on_one_output_are_one_too_many(lines, tmp_path, monkeypatch, capsys):
    from tools.preprocess import output

    monkeypatch.setattr(output, "GRACE_S", 0.1)
    command = (lines, "--output", tmp_path / "x", "--tokenizer", "byte")
    with output.Output(tmp_path / "x").claimed(output.ArrayShare()):
        assert run(*command) == 2
        assert "another process writes there" in capsys.readouterr().err
        assert run(*command, "--part", "0/2") == 2
    assert run(*command) == 0


def test_parts_share_the_units_and_the_last_one_finishes(lines, tmp_path, capsys):
    for name, parts in (("one", [()]), ("three", [("--part", f"{n}/3") for n in (2, 0, 1)])):
        (tmp_path / name).mkdir()
        command = (lines, "--tokenizer", "byte", "--unit_mb", 0.05, "--merge", "--shuffle_docs", 3)
        for part in parts:
            assert run(*command, "--output", tmp_path / name / "x", *part) == 0
    assert results(tmp_path / "one") == results(tmp_path / "three")
    assert "part 2 of 3 is done; " in capsys.readouterr().out


@pytest.mark.parametrize(
    "parts, flags",
    [([()], ("--merge",)), ([("--part", "0/2"), ("--part", "1/2")], ("--merge", "--shuffle_docs", 3))],
)
def test_a_finished_join_given_again_changes_nothing(lines, tmp_path, capsys, parts, flags):
    """Its units are gone then, and joining none of them would make an empty pair."""
    command = (lines, "--output", tmp_path / "x", "--tokenizer", "byte", "--unit_mb", 0.1, *flags)
    for part in parts:
        capsys.readouterr()
        assert run(*command, *part) == 0
    made, printed = results(tmp_path), capsys.readouterr().out
    assert len(made["x_text_document.bin"]) > 100_000 and "120 documents" in printed
    for part in (*parts, *parts):
        assert run(*command, *part) == 0
        assert results(tmp_path) == made
        assert capsys.readouterr().out == printed
    assert run("verify", tmp_path / "x") == 0


def test_another_command_on_an_output_is_refused_with_the_difference(lines, tmp_path, capsys):
    command = (lines, "--output", tmp_path / "x", "--tokenizer", "byte")
    assert run(*command) == 0
    assert run(*command, "--unit_mb", 0.1) == 2
    assert "unit_bytes: 4194304 there, 100000 here" in capsys.readouterr().err
    assert run(*command) == 0  # nothing is left to do, and it says again what there is
    assert "120 documents" in capsys.readouterr().out
    assert run(*command, "--unit_mb", 0.1, "--overwrite") == 0
    assert len(resolve((str(tmp_path / "x"),)).prefixes) > 3


def test_a_changed_input_is_refused(lines, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines.read_bytes())
    command = (source, "--output", tmp_path / "x", "--tokenizer", "byte")
    assert run(*command) == 0
    source.write_bytes(lines.read_bytes() + b'{"text": "more"}\n')
    assert run(*command) == 2
    assert "inputs: 1 gone or changed, 1 new" in capsys.readouterr().err


def test_shards_of_others_are_not_overwritten(lines, tmp_path, capsys):
    Path(tmp_path / "x-00000-of-00001.idx").write_text("mine")
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert "x-00000-of-00001.idx is already there" in capsys.readouterr().err


def test_shuffled_documents_are_the_same_documents_in_a_seeds_order(lines, tmp_path):
    made = {}
    for name, flags in (("plain", ()), ("a", ("--shuffle_docs", 1)), ("b", ("--shuffle_docs", 2))):
        command = (lines, "--output", tmp_path / name, "--tokenizer", "byte", "--unit_mb", 0.05)
        assert run(*command, *flags) == 0
        made[name] = documents(tmp_path / name)
    assert made["a"] != made["plain"] != made["b"] != made["a"]
    assert sorted(made["a"]) == sorted(made["b"]) == sorted(made["plain"])
    places = [made["plain"].index(document) for document in made["a"]]
    assert np.mean(np.abs(np.diff(places)) == 1) < 0.1  # neighbours are neighbours no longer, over all shards
    whole = (lines, "--output", tmp_path / "w", "--tokenizer", "byte", "--unit_mb", 0.05, "--workers", 1)
    assert run(*whole, "--shuffle_docs", 1, "--merge") == 0
    assert documents(tmp_path / "w") == made["a"]


def test_the_hashes_of_more_documents_than_are_compared_are_not_all_in_memory(tmp_path, monkeypatch):
    import tracemalloc

    from tools.preprocess import summary
    from tools.preprocess.output import Output

    output, draw = Output(tmp_path / "x"), np.random.default_rng(1)
    output.folder.mkdir()
    hashes = draw.integers(0, 2**64, 400_000, np.uint64)
    for index, part in enumerate(np.split(np.concatenate([hashes, hashes]), 40)):
        part.tofile(output.hashes(index))
    monkeypatch.setattr(summary, "MOST_HASHES", 80_000)
    tracemalloc.start()
    duplicates, part = summary._duplicates([output.hashes(index) for index in range(40)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert part == 0.1 and duplicates == pytest.approx(400_000, rel=0.02)
    assert peak < 3 * 8 * 80_000


def test_joined_shards_are_one(lines, tmp_path):
    for name, flags in (("many", ("--unit_mb", 0.05)), ("one", ())):
        assert run(lines, "--output", tmp_path / name, "--tokenizer", "byte", "--merge", *flags) == 0
    assert shard_bytes(tmp_path / "many_text_document") == shard_bytes(tmp_path / "one_text_document")
    assert resolve((str(tmp_path / "many"),)).prefixes == (tmp_path / "many_text_document",)


def test_a_prefix_opens_all_its_shards_and_misses_none(lines, tmp_path):
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", "byte", "--unit_mb", 0.05) == 0
    found = resolve((str(tmp_path / "x"),)).prefixes
    assert len(found) > 5
    assert list(found) == sorted(path.with_suffix("") for path in tmp_path.glob("x-*.idx"))
    Path(f"{found[2]}.idx").unlink()
    with pytest.raises(UserError, match=r"1 of the \d+ shards of .*x are missing, the first x-00002-of-"):
        resolve((str(tmp_path / "x"),))


def test_a_unit_without_documents_is_no_gap(tmp_path):
    lines = [json.dumps({"text": text}) + "\n" for text in ("a" * 100, "", "", "", "b" * 100)]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    assert run(tmp_path / "x.jsonl", "--output", tmp_path / "x", "--tokenizer", "byte", "--unit_mb", 0.00002) == 0
    assert len(resolve((str(tmp_path / "x"),)).prefixes) == 2
    assert list(tmp_path.glob("x-*.empty.json"))


def test_a_disk_too_small_is_refused_before_anything_is_written(lines, tmp_path, monkeypatch, capsys):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", "byte") == 2
    assert "Make room" in capsys.readouterr().err
    assert not list(tmp_path.glob("x-*"))
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", "byte", "--no_check_space") == 0


@pytest.mark.parametrize("content", [b"", b"{", param(b"\0" * 80), b"[1]", param(b'{"jsonl_key": "text"'), b"\xff"])
@pytest.mark.parametrize("part", [(), ("--part", "0/2")])
def test_a_plan_that_cannot_be_read_is_said_with_a_way_out(lines, tmp_path, capsys, content, part):
    command = (lines, "--output", tmp_path / "x", "--tokenizer", "byte", "--unit_mb", 0.1)
    assert run(*command, *part) == 0
    (tmp_path / "x.preprocess" / "plan.json").write_bytes(content)
    assert run(*command, *part) == 2
    printed = capsys.readouterr().err
    assert f"--output {tmp_path / 'x'}: {tmp_path / 'x.preprocess' / 'plan.json'} cannot be read" in printed
    assert "expected the plan" in printed and "give --overwrite, without --part" in printed
    assert run(*command, "--overwrite") == 0
    assert run("verify", tmp_path / "x") == 0


def test_a_disk_that_fills_leaves_nothing_half_written(lines, tmp_path):
    """A limit on the size of files is what a full disk is to a process: writing fails (with EFBIG)."""
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))\n"
        "from tools.preprocess.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [str(one) for one in (lines, "--output", tmp_path / "x", "--tokenizer", "byte", "--workers", 1)]
    ran = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "File too large" in ran.stderr
    assert not list(tmp_path.glob("x-*"))
    assert not list(tmp_path.rglob("*.tmp-*"))
    assert run(*command) == 0


def test_verify_names_file_and_range(lines, tmp_path, capsys):
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", "byte", "--unit_mb", 0.2) == 0
    assert run("verify", tmp_path / "x") == 0
    assert run("verify", tmp_path) == 0
    guilty = sorted(tmp_path.glob("x-*.bin"))[1]
    raw = bytearray(guilty.read_bytes())
    raw[1000] ^= 1
    guilty.write_bytes(raw)
    capsys.readouterr()
    assert run("verify", tmp_path / "x") == 1
    assert f"{guilty}: bytes 0 to {len(raw)} are not what was written" in capsys.readouterr().out
    guilty.write_bytes(raw[:-2])
    assert run("verify", tmp_path / "x") == 1
    assert "truncated" in capsys.readouterr().out
    assert run("verify", tmp_path / "none") == 2


def test_checksums_are_by_block(tmp_path):
    from data import manifest

    data = os.urandom(2_500)
    sums = BlockSums(1000)
    for start in range(0, 2500, 300):
        sums.update(memoryview(data)[start : start + 300])
    whole = BlockSums(1000)
    whole.update(memoryview(data))
    assert sums.result() == whole.result()
    assert len(whole.result().blocks) == 3
    path = tmp_path / "x"
    path.write_bytes(data[:1500] + bytes([data[1500] ^ 1]) + data[1501:])
    original, manifest.BLOCK_BYTES = BLOCK_BYTES, 1000
    try:
        found = list(manifest.damaged_blocks(path, whole.result(), lambda size: None))
    finally:
        manifest.BLOCK_BYTES = original
    assert found == [f"{path}: bytes 1000 to 2000 are not what was written"]
