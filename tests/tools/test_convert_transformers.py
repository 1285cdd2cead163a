"""The plain import of folders that transformers wrote: every architecture of the tables, and the way on from there.

The comparisons of logits run in this file's one process and its forks, where the command starts processes.
"""

import contextlib
import io
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from models.hf.families import ARCHITECTURES
from parallel.errors import UserError
from parallel.launch import Identity
from ranks import run_ranks
from tests.tools.transformers_folders import MODELS, save_model
from tools.convert import logits
from tools.convert.__main__ import main

ONE_AT_A_TIME = threading.Lock()


def compute(command: list[str], whose: str, timeout_s: float) -> None:
    """In place of a process for each side: theirs here, where transformers' models are imported; ours in a fork."""
    side, folder, output, dtype = command[3:]
    with ONE_AT_A_TIME:
        if side == "hf_folder":
            logits.theirs_to_file(Path(folder), Path(output), dtype)
            return
        if not (child := os.fork()):
            code = 1
            try:
                logits.ours_to_file(Path(folder), Path(output), dtype)
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            raise UserError(f"{whose} logits could not be computed")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command says of each: exit code, output."""
    root = tmp_path_factory.mktemp("transformers")

    def import_all(_: Identity) -> None:
        logits._run = compute
        found = {}
        for name in MODELS:
            out, folder = io.StringIO(), root / name.replace(" ", "_")
            save_model(folder, name)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                code = main(["import", str(folder), f"{folder}.imported"])
            found[name] = code, out.getvalue()
        (root / "said.json").write_text(json.dumps(found))

    run_ranks(1, import_all)
    found: dict[str, Any] = json.loads((root / "said.json").read_text())
    return found


def test_every_architecture_is_here() -> None:
    """But for Kimi K2, whose class transformers has not."""
    assert {name.split()[0] for name in MODELS} == ARCHITECTURES.keys() - {"kimi_k2"}


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_wrote_is_imported_by_the_plain_command(said: dict[str, Any], name: str) -> None:
    code, text = said[name]
    assert code == 0, text
    assert "note: logits of 64 tokens agree within " in text
    assert "no tokenizer" not in text
