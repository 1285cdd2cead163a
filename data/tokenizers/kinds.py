"""Which tokenizer a file or folder holds, by its content; its name decides where that cannot tell."""

import re
from pathlib import Path
from typing import Literal

from data.tokenizers.gpt2_pair import MERGES, VOCABULARY
from data.tokenizers.vocabulary import said
from program.errors import UserError
from program.untrusted import open_regular

Kind = Literal["json", "vocabulary", "merges", "description", "tiktoken", "sentencepiece"]
HEAD_BYTES = 64 << 10
IDS = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\d+\s*[,}]')
"""How an object of texts and ids begins."""
RANKS = re.compile(rb"\s*[A-Za-z0-9+/]+={0,2}[ \t]+\d+\s*(\n|$)")
PIECES = re.compile(rb"[^\s]+ [^\s]+\r?\n[^\s]+ [^\s]+\r?(\n|$)")
IN_FOLDERS = "tokenizer.json", VOCABULARY, "tokenizer.model", "*.tiktoken", "*.model"
"""What is opened of a folder, the first that is there."""
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")


def kind_of(path: Path, flags: str) -> Kind:
    """Of a file that is there. flags: what stands before `tokenizer` where a user sets it. Raises UserError for what
    cannot be read or is none."""
    with said(flags, path), open_regular(path) as file:
        head = file.read(HEAD_BYTES)
    if not head.strip():
        raise UserError(f"{flags}tokenizer: {path} is empty. Copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{flags}tokenizer: {path} is a pointer of Git LFS, not the file. `git lfs pull` fetches it.")
    if path.name in CONFIGS:
        raise UserError(f"{flags}tokenizer: {path} holds settings, no tokenizer. Give its folder, {path.parent}.")
    return _by_content(head, path) or _by_name(path)


def _by_content(head: bytes, path: Path) -> Kind | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        if IDS.match(text):
            return "vocabulary"
        has_ranks = path.suffix == ".json" and path.with_suffix(".tiktoken").is_file()
        return "description" if has_ranks and b'"pat_str"' in text else "json"
    if head.startswith(b"\n") and not text.startswith(b"#version"):  # a protobuf, whose first field is a piece
        return "sentencepiece"
    if text.startswith(b"#version"):
        return "merges"
    if RANKS.match(text):
        return "tiktoken"
    return "merges" if path.suffix in (".txt", ".bpe") and PIECES.match(text) else None


def _by_name(path: Path) -> Kind:
    if path.suffix == ".json":
        return "json"
    return "tiktoken" if path.suffix == ".tiktoken" else "sentencepiece"


def file_in(folder: Path, flags: str) -> Path:
    """The tokenizer's file in a folder as the Hub has them. Raises UserError where there is none, or several may be
    meant."""
    for pattern in IN_FOLDERS:
        found = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith("."))
        if pattern == VOCABULARY and not (folder / MERGES).is_file():
            found = []
        if len(found) > 1:
            names = ", ".join(path.name for path in found[:5])
            raise UserError(f"{flags}tokenizer: folder {folder} holds {names}; expected one. Name the file.")
        if found:
            return found[0]
    there = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    listed = f"{', '.join(there[:10])}{', …' if len(there) > 10 else ''}" or "nothing"
    raise UserError(
        f"{flags}tokenizer: folder {folder} holds no tokenizer.json, no {VOCABULARY} with {MERGES}, no tokenizer.model "
        f"and no .tiktoken; found: {listed}."
    )
