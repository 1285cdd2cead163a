"""What a resume says of data that is not what it was."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.prepared import Prepared, PreparedSource
from data.shard_writer import ShardWriter
from data.shards import Shard
from data.tokenizers.base import ByteTokenizer
from training.config.run_config import RunConfig
from training.run_dir.data_changes import changed_entries, data_changes, data_entry
from training.start import prepare

ENTRY: dict[str, Any] = {
    "fingerprint": "f0",
    "seed": 1,
    "sources": {
        "code": {"weight": 3, "tokens": 90, "shards": "aa", "each_shard": "11 22 33"},
        "web": {"weight": 1, "tokens": 50, "shards": "bb", "each_shard": "44"},
    },
}


def changed(**code: Any) -> list[str]:
    """What is said where these entries of the source "code" are others."""
    now = copy.deepcopy(ENTRY)
    now["fingerprint"] = "f1"
    now["sources"]["code"] |= code
    return data_changes(ENTRY, now)


def test_the_shard_that_is_another_one_is_named() -> None:
    assert changed(shards="cc", each_shard="11 99 33") == [
        "shards of source code: cc (was: aa); changed, of 3 counted from 0: 1"
    ]
    assert changed(shards="cc", each_shard="11 22 33 55", tokens=120) == [
        "shards of source code: cc (was: aa); 4 shards (were: 3)",
        "tokens of source code: 120 (was: 90)",
    ]


def test_where_a_source_lies_changes_nothing() -> None:
    now = copy.deepcopy(ENTRY)
    now["sources"] = {f"/elsewhere/{name}": source for name, source in now["sources"].items()}
    assert data_changes(ENTRY, now) == []
    now["sources"].pop("/elsewhere/web")
    assert data_changes(ENTRY, now) == ["sources are /elsewhere/code (were: code, web)"]


def test_what_an_older_version_did_not_keep_is_no_change() -> None:
    before = copy.deepcopy(ENTRY)
    for source in before["sources"].values():
        del source["each_shard"]
    assert data_changes(before, ENTRY | {"engine": "tiktoken"}) == []
    assert data_changes(None, ENTRY) == []
    before["sources"]["code"]["shards"] = "cc"
    assert data_changes(before, ENTRY) == ["shards of source code: aa (was: cc)"]


def test_the_entries_that_changed_are_named() -> None:
    before = copy.deepcopy(ENTRY)
    for source in before["sources"].values():
        del source["each_shard"]
    assert changed_entries(before, ENTRY | {"seed": 2, "engine": "tiktoken"}) == ["seed"]
    before["sources"]["code"]["tokens"] = 91
    assert changed_entries(before | {"dropped": 1}, ENTRY) == ["sources"]
    assert changed_entries(None, ENTRY) == []


def test_a_change_that_no_entry_tells_is_that_of_the_whole() -> None:
    assert data_changes(ENTRY, ENTRY | {"fingerprint": "f1"}) == ["fingerprint is f1 (was: f0)"]
    assert data_changes(ENTRY, ENTRY | {"seed": 2, "fingerprint": "f1"}) == ["seed is 2 (was: 1)"]
    (line,) = data_changes(ENTRY | {"fingerprint": "f" * 100_000}, ENTRY)
    assert line.startswith("fingerprint is f0 (was: ffff") and len(line) < 300


def of_shards(folder: Path, *lengths: tuple[int, ...]) -> Prepared:
    """One source; shards of documents with as many tokens."""
    shards = []
    for number, shard in enumerate(lengths):
        with ShardWriter(folder / f"shard{number}", 256) as writer:
            for length in shard:
                writer.add(np.zeros(length, np.int64))
                writer.end_document()
        shards.append(Shard(folder / f"shard{number}"))
    source = PreparedSource(name="data", shards=tuple(shards), units=1, fingerprint="", tokens=1)
    return Prepared(tokenizer=ByteTokenizer(), shards=tuple(shards), fingerprint="", sources=(source,))


def test_orders_of_the_time_when_each_shard_was_cut_alone_are_others(tmp_path: Path) -> None:
    config = RunConfig()
    assert data_entry(config, of_shards(tmp_path, (9, 9)))["split"] == config.data.split  # of one, the cut is the same
    now = data_entry(config, of_shards(tmp_path, (9, 9), (9,)))
    assert data_changes(now | {"split": config.data.split}, now) == [
        "split is 969,30,1 over all shards of a source (was: 969,30,1)"
    ]


def test_what_is_far_from_the_share_of_documents_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 20 documents the last one validates, and holds half of the tokens."""
    for last, printed in ((1900, "data: 50.0% of the tokens train, not 95.0% as of the documents"), (100, "")):
        given = of_shards(tmp_path, (100,) * 10, (*(100,) * 9, last))
        monkeypatch.setattr(prepare, "prepare_data", lambda config, say, given=given: given)
        config = RunConfig()
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, split="95,5,0"),
            model=dataclasses.replace(config.model, seq_length=32),
            train=dataclasses.replace(config.train, eval_interval=None),
        )
        prepare.prepare(config, None)
        said = capsys.readouterr().out
        assert (printed in said) and (bool(printed) == ("as of the documents" in said))
