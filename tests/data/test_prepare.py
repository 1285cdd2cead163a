import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import corpus
from data.cache import root
from data.config import DataConfig
from data.prepare import prepare
from data.raw import pieces
from data.shards import Shard
from data.tokenizers.base import ByteTokenizer
from program.errors import UserError

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def config(tmp_path):
    """Raw files of three documents, one of them empty, and a cache that does not exist yet."""
    lines = [json.dumps({"text": text}) for text in ("erste Zeile ü", "", "zweite")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("dritte\nvierte\n")
    paths = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"))
    return DataConfig(paths=paths, tokenizer="byte", cache_dir=str(tmp_path / "cache"))


def silent(line):
    pass


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_raw_files_become_documents_ended_by_eod(config):
    prepared = prepare(config, silent)
    (prefix,) = prepared.prefixes
    shard = Shard(prefix)
    assert shard.document_count == 3
    expected = [*"erste Zeile ü".encode(), 256, *b"zweite", 256, *b"dritte\nvierte\n", 256]
    assert shard.tokens.tolist() == expected
    assert prepared.tokenizer.path is None


def test_a_second_call_reads_no_text_and_changes_nothing(config, monkeypatch):
    first = prepare(config, silent)
    before = files_of(config.cache_dir)
    monkeypatch.setattr(pieces, "read", None)
    lines = []
    second = prepare(config, lines.append)
    assert (second.prefixes, second.fingerprint) == (first.prefixes, first.fingerprint)
    assert files_of(config.cache_dir) == before
    assert lines == []


def test_a_changed_file_is_tokenised_again(config):
    first = prepare(config, silent)
    Path(config.paths[1]).write_text("anders")
    second = prepare(config, silent)
    assert first.prefixes != second.prefixes
    assert Shard(second.prefixes[0]).tokens[-7:].tolist() == [*b"anders", 256]
    assert first.fingerprint != second.fingerprint


def same_times(path, status):
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def overwritten(path):
    """As by an editor and `touch -r`."""
    status = path.stat()
    path.write_text(path.read_text().replace("dritte", "andere"))
    same_times(path, status)


def moved(path):
    """As by `cp -p` and `mv`, of a file that differs in its middle only."""
    status, other = path.stat(), path.with_name("other")
    text = path.read_text()
    other.write_text(text[:80_000] + "andere" + text[80_006:])
    same_times(other, status)
    other.replace(path)


@pytest.mark.parametrize("replace", [overwritten, moved])
def test_a_file_replaced_by_one_of_the_same_size_and_time_is_tokenised_again(config, replace):
    path = Path(config.paths[1])
    path.write_text("dritte" + "x" * 200_000)
    first, status = prepare(config, silent), path.stat()
    replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    second = prepare(config, silent)
    assert first.prefixes != second.prefixes
    assert b"andere" in bytes(Shard(second.prefixes[0]).tokens[-200_007:-1].astype(np.uint8))


def test_a_file_that_changes_while_it_is_tokenised_leaves_no_cache(config, monkeypatch):
    real = pieces.read

    def read(*which):
        yield from real(*which)
        if which[0].path == config.paths[1]:
            overwritten(Path(config.paths[1]))

    monkeypatch.setattr(pieces, "read", read)
    with pytest.raises(UserError, match="changed while it was tokenised"):
        prepare(config, silent)
    assert not [path for path in files_of(config.cache_dir) if path.suffix != ".lock"]


def test_prefixes_are_used_where_they_lie(config, tmp_path):
    (made,) = prepare(config, silent).prefixes
    again = DataConfig(paths=(str(made),), tokenizer="byte", cache_dir=str(tmp_path / "unused"))
    assert prepare(again, silent).prefixes == (made,)
    assert not (tmp_path / "unused").exists()


def short(path):
    path.write_bytes(b"short")


def another_token(path):
    path.write_bytes(b"\1" + path.read_bytes()[1:])


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def nothing_but_a_link(path):
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "whole.json"])
@pytest.mark.parametrize("damage", [short, another_token, Path.unlink, pipe, nothing_but_a_link])
def test_a_damaged_cache_is_made_again(config, damage, name):
    (prefix,) = prepare(config, silent).prefixes
    whole = files_of(prefix.parent)
    damage(prefix.with_name(name))
    prepare(config, silent)
    assert files_of(prefix.parent) == whole


def test_a_lock_that_is_no_file_is_not_waited_for(config):
    (prefix,) = prepare(config, silent).prefixes
    prefix.with_name("tokens.bin").unlink()
    pipe(prefix.parent.with_name(f"{prefix.parent.name}.lock"))
    prepare(config, silent)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_files_without_text_are_an_empty_corpus(tmp_path, content):
    (tmp_path / "x.jsonl").write_text(content)
    config = DataConfig(paths=(str(tmp_path / "x.jsonl"),), tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"empty corpus.*x\.jsonl"):
        prepare(config, silent)
    assert not [path for path in files_of(tmp_path / "cache") if path.suffix != ".lock"]


def test_a_missing_file_is_reported_before_anything_is_made(tmp_path):
    config = DataConfig(paths=(str(tmp_path / "x.txt"),), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"x\.txt"):
        prepare(config, silent)
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_names_its_field(config, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        prepare(config, silent)


def prepare_at_once(config, barrier, results):
    lines = []
    barrier.wait()
    prepared = prepare(config, lines.append)
    results.put((prepared.fingerprint, prepared.tokenizer.fingerprint, sum("tokenising" in x for x in lines)))


def test_two_processes_at_once_make_one_whole_cache(config, tmp_path):
    config = DataConfig(paths=config.paths, cache_dir=config.cache_dir, builtin_vocab_size=600)
    barrier, results = FORK.Barrier(2), FORK.Queue()
    workers = [FORK.Process(target=prepare_at_once, args=(config, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert found[0][:2] == found[1][:2]
    assert sum(tokenised for *_, tokenised in found) == 1
    elsewhere = DataConfig(paths=config.paths, cache_dir=str(tmp_path / "other"), builtin_vocab_size=600)
    assert prepare(elsewhere, silent).fingerprint == found[0][0]
    assert files_of(config.cache_dir) == files_of(elsewhere.cache_dir)


def prepare_and_hang(config, halfway):
    """Tokenise the first pieces, say so, and wait to be killed."""
    real = pieces.read

    def read(*which):
        yield from real(*which)
        halfway.set()
        time.sleep(60)

    pieces.read = read
    prepare(config, silent)


def test_a_killed_prepare_leaves_nothing_that_the_next_accepts(config, tmp_path):
    halfway = FORK.Event()
    worker = FORK.Process(target=prepare_and_hang, args=(config, halfway))
    worker.start()
    assert halfway.wait(30)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    leftovers = [path for path in files_of(config.cache_dir) if path.suffix != ".lock"]
    assert leftovers, "the kill came too early to prove anything"
    prepare(config, silent)
    elsewhere = DataConfig(paths=config.paths, tokenizer="byte", cache_dir=str(tmp_path / "other"))
    prepare(elsewhere, silent)
    assert files_of(config.cache_dir) == files_of(elsewhere.cache_dir)


def test_builtin_corpus_end_to_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(corpus, "MAX_BYTES", 1_000_000)
    lines = []
    prepared = prepare(DataConfig(cache_dir=str(tmp_path)), lines.append)
    shard = Shard(prepared.prefixes[0])
    assert prepared.tokenizer.vocab_size == 2048
    assert prepared.tokenizer.path is not None
    assert shard.dtype == np.uint16
    assert shard.document_count == len(corpus.files())
    first = shard.tokens[: shard.document_start(1) - 1]
    assert prepared.tokenizer.decode(first) == corpus.files()[0].read_bytes().decode()
    assert shard.tokens[shard.document_start(1) - 1] == prepared.tokenizer.eod
    assert len(lines) == 3
    assert capfd.readouterr() == ("", "")


def run_python(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)


def test_nothing_here_needs_torch_or_megatron(config):
    program = (
        "import sys, data.source, data.prepare; from data.config import DataConfig\n"
        f"data.prepare.prepare({config!r}, print)\n"
        "print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.splitlines()[-1] == "[]"
    assert ran.stderr == ""


def test_config_needs_only_the_standard_library():
    program = "import sys, data.config; print(sorted({'numpy', 'torch', 'platformdirs'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[]\n"


def test_fingerprint_covers_the_tokenizer(config, monkeypatch):
    prepared = prepare(config, silent)
    monkeypatch.setattr(ByteTokenizer, "fingerprint", "other")
    assert prepare(config, silent).fingerprint != prepared.fingerprint


@pytest.mark.parametrize("folder", ["/proc/x", "/proc/1/x/y", "/dev/null/x"])
def test_a_cache_that_cannot_be_is_named(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=rf"data.cache_dir: cannot write below {folder}"):
        prepare(DataConfig(paths=(str(tmp_path / "a.txt"),), tokenizer="byte", cache_dir=folder), print)


def test_neither_a_home_nor_a_name_in_passwd(monkeypatch):
    """Of a process forked for it, whose user has no entry."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setuid(54321)
            root(DataConfig())
        except UserError as error:
            code = 7 * ("data.cache_dir: this user has no home folder" in str(error))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (7 if os.getuid() == 0 else 1)
