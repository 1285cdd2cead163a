"""A file's content changed with an eye for its structure: JSON, TOML, tables of numbers, text. From a seed.

Structure-aware operators are seeded ones of our own, since a change needs a name for its case to be judged;
what they put in place comes from Hypothesis in part (``hostile_values``).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.hostile_values import json_text

MARK = "\ue000hostile\ue000"
"""Stands for the value that is put in place until the rest is written."""
Path_ = tuple[str | int, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Mutation:
    """What was done."""

    kind: str
    file: str
    """The name of what was changed."""
    text: str
    """For people, short."""
    names: tuple[str, ...] = ()
    """Fields: a message that has the file's name or one of these names what is wrong."""


def mutate(path: Path, draw: Random) -> Mutation:
    """Change a file in place. Its content is what decides how."""
    data = path.read_bytes()
    choices: list[Callable[[bytes, Random], tuple[str, bytes, str, tuple[str, ...]]]] = [raw]
    if path.suffix in (".json", ".jsonl") and data.strip():
        choices += [json_tree] * 4
    elif path.suffix == ".toml":
        choices += [toml_line] * 4
    elif path.suffix == ".safetensors":
        choices = [
            cut,
            safetensors_header,
            safetensors_header,
            safetensors_header,
        ]  # nothing in such a file says what its tensors' bytes must be
    elif b"\0" in data[:4096]:
        choices += [words_of_table] * 2
    else:
        choices += [text_word] * 2
    while True:
        kind, changed, text, names = draw.choice(choices)(data, draw)
        if changed != data:
            path.write_bytes(changed)
            return Mutation(kind=kind, file=path.name, text=f"{path.name}: {text}"[:300], names=names)


def raw(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """Bytes, whatever they mean."""
    at = draw.randrange(len(data) + 1)
    kind, changed = draw.choice([
        ("empty", b""),
        ("cut", data[:at]),
        ("byte order mark", b"\xef\xbb\xbf" + data),
        ("NUL", data[:at] + b"\0" + data[at:]),
        ("not UTF-8", data[:at] + draw.choice([b"\xff\xfe", b"\xc3(", b"\x80", b"\xed\xa0\x80"]) + data[at:]),
        ("line ends of Windows", data.replace(b"\n", b"\r\n")),
        ("twice", data + data),
        ("bit flip", flipped(data, draw)),
        ("zeros", bytes(len(data))),
        ("UTF-16", data[:100_000].decode("latin-1").encode("utf-16")),
        ("escape sequence", data[:at] + b"\x1b[2J\x1b[31m" + data[at:]),
        ("tail", data + draw.randbytes(draw.choice([1, 8, 5000]))),
    ])  # fmt: skip
    return f"bytes: {kind}", changed, f"{kind} at {at}", ()


def cut(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """Shorter or longer."""
    at = draw.randrange(len(data))
    kind, changed = draw.choice([("cut", data[:at]), ("longer", data[:at] + b"\x1b[2J" + data[at:]), ("empty", b"")])
    return f"bytes: {kind}", changed, f"{kind} at {at}", ()


def flipped(data: bytes, draw: Random) -> bytes:
    """With one bit changed."""
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def json_tree(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """One place of a JSON document, or of a line of a .jsonl: another value, no value, another key, two of a key."""
    try:
        document = json.loads(data)
        head, tail = b"", b""
    except ValueError:
        lines = data.split(b"\n")
        numbers = [number for number, line in enumerate(lines) if line.strip()]
        number = draw.choice(numbers)
        try:
            document = json.loads(lines[number])
        except ValueError:
            return raw(data, draw)
        head = b"".join(line + b"\n" for line in lines[:number])
        tail = b"".join(b"\n" + line for line in lines[number + 1 :])
    kind, text, names = changed_tree(document, draw)
    return f"JSON: {kind}", head + text.encode("utf-8", "surrogatepass") + tail, f"{kind} {names[-1:]}", names


def changed_tree(document: Any, draw: Random) -> tuple[str, str, tuple[str, ...]]:
    """The kind of change, the document's text with it, and what the place is called."""
    place = draw.choice(places(document))
    names = named(place)
    parent, key = at(document, place[:-1]), place[-1] if place else None
    kind = draw.choice(["value", "value", "value", "gone", "renamed", "twice", "case"])
    if key is None or kind == "value":
        value = json_text(draw)
        return "other value", json.dumps(put(document, place, MARK)).replace(json.dumps(MARK), value), names
    if isinstance(parent, list):
        parent = [*parent]
        if kind == "gone":
            parent.pop(int(key))
        else:
            parent.insert(int(key), parent[int(key)])
        return "other length", json.dumps(put(document, place[:-1], parent)), names
    if kind == "twice":
        value = json_text(draw)
        body = json.dumps(put(document, place[:-1], {**parent, MARK: 0}))
        return "key twice", body.replace(f"{json.dumps(MARK)}: 0", f"{json.dumps(key)}: {value}"), names
    rest = {name: value for name, value in parent.items() if name != key}
    if kind != "gone":
        other = str(key).swapcase() if kind == "case" else draw.choice(["", "\x1b[31m", "x" * 5000, "__class__", "/"])
        rest |= {other: parent[key]}
    return f"key {kind}", json.dumps(put(document, place[:-1], rest)), names


def places(document: Any, before: Path_ = ()) -> list[Path_]:
    """Every place of a document, the whole included."""
    found = [before]
    if isinstance(document, dict):
        inner: Sequence[tuple[str | int, Any]] = list(document.items())
    elif isinstance(document, list):
        inner = list(enumerate(document[:50]))
    else:
        return found
    for key, value in inner[:200]:
        found += places(value, (*before, key))
    return found


def at(document: Any, place: Path_) -> Any:
    """What lies there."""
    for key in place:
        document = document[key]
    return document


def put(document: Any, place: Path_, value: Any) -> Any:
    """The document with ``value`` there."""
    if not place:
        return value
    key, rest = place[0], place[1:]
    if isinstance(document, dict):
        return {name: put(inner, rest, value) if name == key else inner for name, inner in document.items()}
    return [put(inner, rest, value) if number == key else inner for number, inner in enumerate(document)]


def named(place: Path_) -> tuple[str, ...]:
    """What messages may call a place: its keys, from the outermost, without numbers of lists."""
    return tuple(key for key in place if isinstance(key, str) and len(key) > 2)


def toml_line(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """A ``key = value`` line of TOML: another value, gone, twice, another key; or a table's head."""
    lines = data.decode(errors="surrogateescape").split("\n")
    numbers = [number for number, line in enumerate(lines) if re.match(r"\s*[\w\"'./-]+\s*=", line)]
    if not numbers:
        return raw(data, draw)
    number = draw.choice(numbers)
    key, _, value = lines[number].partition("=")
    names = (key.strip().strip("\"'"),)
    new = json_text(draw).replace("null", "none").replace("NaN", "nan").replace("Infinity", "inf")
    kind, line = draw.choice([
        ("other value", f"{key}= {new}"),
        ("other value", f"{key}= {new}"),
        ("other value", f"{key}= {new}"),
        ("inline table", f"{key}= {{a = {value.split('#')[0].strip()}}}"),
        ("date", f"{key}= 2026-11-23T00:00:00Z"),
        ("key gone", ""),
        ("key twice", f"{lines[number]}\n{lines[number]}"),
        ("key renamed", f"{key.strip()}x ={value}"),
        ("key case", f"{key.swapcase()}={value}"),
        ("key quoted", f'"\\u001b[31m{key.strip()}" ={value}'),
        ("table", f"[{key.strip()}]"),
        ("table of tables", f"[[{key.strip()}]]"),
    ])  # fmt: skip
    lines[number] = line
    return f"TOML: {kind}", "\n".join(lines).encode(errors="surrogateescape"), f"{names[0]}: {line[:80]!r}", names


def words_of_table(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """A binary table: numbers of 4 or 8 bytes, most of them near the head, out of range, swapped or moved."""
    size = draw.choice([4, 8])
    reach = min(len(data), 200) if draw.random() < 0.7 else len(data)
    if reach < 2 * size:
        return raw(data, draw)
    first, second = (draw.randrange(reach // size) * size + draw.choice([0, 0, 1, 2]) for _ in range(2))
    values = (-1, 0, 1, 2**31 - 1, -(2**31)) if size == 4 else (-1, 0, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
    number = draw.choice(values).to_bytes(size, "little", signed=True)
    kind, changed = draw.choice([
        ("number", data[:first] + number + data[first + size :]),
        ("number", data[:first] + number + data[first + size :]),
        ("copied", data[:first] + data[second : second + size] + data[first + size :]),
        ("spliced", data[:first] + data[second:]),
        ("moved", data[:first] + bytes(size) + data[first:]),
    ])  # fmt: skip
    return f"table: {kind}", changed, f"{kind} at {first}", ()


def safetensors_header(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """The length of the header, or the JSON of it: offsets, shapes, names."""
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.25:
        number = draw.choice([0, 1, size - 1, size + 1, 2**31, 2**62, 2**64 - 1, len(data)])
        return "safetensors: header's length", number.to_bytes(8, "little") + data[8:], f"length {number}", ()
    kind, text, names = changed_tree(json.loads(data[8 : 8 + size]), draw)
    header = text.encode("utf-8", "surrogatepass")
    return f"safetensors: {kind}", len(header).to_bytes(8, "little") + header + data[8 + size :], text[:80], names


def text_word(data: bytes, draw: Random) -> tuple[str, bytes, str, tuple[str, ...]]:
    """A word of a text: another one, a very long one, none, twice."""
    words = list(re.finditer(rb"[^\s=]+", data))
    if not words:
        return "text: another", json_text(draw).encode("utf-8", "surrogatepass"), "another text", ()
    word = draw.choice(words)
    new = draw.choice([
        json_text(draw).encode("utf-8", "surrogatepass"), b"", b"x" * 300, b"$(touch witness)", b"`touch witness`",
        b"'", b'"', b"\\", b"-1", b"iter_0000001", b"iter_9999999", b"../..", word[0] * 2, b"a" * 70_000,
    ])  # fmt: skip
    return "text: other word", data[: word.start()] + new + data[word.end() :], f"{word[0]!r}"[:60], ()
