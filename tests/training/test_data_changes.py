"""What a resume says of data that is not what it was."""

import copy
from typing import Any

from training.data_changes import changed_entries, data_changes

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
