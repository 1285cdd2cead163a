"""The plain import of folders that transformers wrote: architectures of the tables, and the way on from there.

The comparisons of logits run in this file's one process and its forks, where the command starts processes.
"""

import contextlib
import dataclasses
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from campaign import some
from data.tokenizers.base import open_tokenizer
from models.families import ARCHITECTURES, base
from models.hf import tables
from models.hf.files import read_configuration
from models.hf.other_keys import NO_EFFECT
from models.hf.row_layouts import stacked
from models.hf.shapes import unread
from parallel.launch import Identity
from program.errors import UserError
from programs import Program
from ranks import run_ranks
from tests.tools.transformers_folders import MODELS, configured, save_model
from tools.convert import logits
from tools.convert.__main__ import main

ONE_AT_A_TIME = threading.Lock()
SHORT = {
    "apertus", "ernie4_5_moe", "gemma2", "glm4", "minimax_m2", "olmo2", "qwen2 windows", "qwen3 tied",
}  # fmt: skip
"""What one class alone has; the others are a campaign's, and tests/tools/test_convert.py has more of them."""
SWAPPED = {
    **base.ATTENTION,
    **base.MLP,
    "mlp.linear_fc1.weight": stacked("mlp.up_proj.weight", "mlp.gate_proj.weight"),
}
"""Gate and up exchanged: every shape is right, and every byte is somewhere."""


def compute(command: list[str], whose: str, timeout_s: float) -> None:
    """In place of a process for each side: theirs here, where transformers' models are imported; ours in a fork."""
    side, folder, output, dtype = command[3:]
    with ONE_AT_A_TIME:
        if side == "hf_folder":
            logits.theirs_to_file(Path(folder), Path(output), dtype)
            return
        program = Program(command[3:], Path(output), module="tools.convert.logits")
        said = program.communicate()[1]
        if program.returncode:
            raise UserError(f"{whose} logits could not be computed: {said}")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command says of each: exit code, output. Beside them, of each class, a folder, other names, keys."""
    root, wanted = tmp_path_factory.mktemp("transformers"), MODELS if request.config.getoption("campaign") else SHORT

    def import_all(_: Identity) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        logits._run = compute
        found: dict[str, Any] = {"root": str(root), "classes": {}}
        for name in MODELS:
            folder = root / name.replace(" ", "_")
            if name in wanted:
                save_model(folder, name)
                found[name] = imported(folder, Path(f"{folder}.imported"))
            else:
                configured(name).save_pretrained(folder)
            kind = CONFIG_MAPPING[name.split()[0]]
            keys = [field.name for field in dataclasses.fields(kind)]
            found["classes"][name.split()[0]] = folder.name, kind.attribute_map, keys
        save_model(root / "swapped", "llama")
        tables.TABLES["llama"] = tables.Table(base.LLAMA_WHOLE, base.ATTENTION | SWAPPED)
        found["swapped"] = imported(root / "swapped", root / "swapped.imported")
        (root / "said.json").write_text(json.dumps(found))

    run_ranks(1, import_all)
    found: dict[str, Any] = json.loads((root / "said.json").read_text())
    return found


def imported(folder: Path, checkpoint: Path) -> tuple[int, str]:
    """By the plain command: exit code, output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return main(["import", str(folder), str(checkpoint)]), out.getvalue()


@pytest.mark.parametrize("name", some(MODELS, SHORT))
def test_what_transformers_wrote_is_imported_by_the_plain_command(said: dict[str, Any], name: str) -> None:
    code, text = said[name]
    assert code == 0, text
    assert "note: logits of 64 tokens agree within " in text
    assert "no tokenizer" not in text
    if name == "qwen2 windows":
        assert ", of blocks 0 and 2. " in text


def test_rows_in_another_order_are_found_and_nothing_stays(said: dict[str, Any]) -> None:
    code, text = said["swapped"]
    assert code == 2 and f"{said['root']}/swapped: block 0: logits differ by up to " in text
    assert not list(Path(said["root"]).glob("swapped.imported*"))


@pytest.mark.campaign
def test_from_a_folder_of_transformers_to_its_generate(said: dict[str, Any], tmp_path: Path) -> None:
    """Imported by the plain command, trained by the command that its config.toml and docs/checkpoints print, exported,
    and read by transformers, whose generation ends where the tokenizer's documents do. The suite's: test_doors.py."""
    imported, texts = Path(said["root"]) / "qwen3_tied.imported", tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "some words of a text " * 20}) for _ in range(20)))
    recipe = (imported / "config.toml").read_text()
    assert "python pretrain_gpt.py CHECKPOINT/config.toml --data.paths YOUR_DATA --run_dir runs/YOUR_NAME" in recipe
    command = [f"{imported}/config.toml", "--data.paths", str(texts)]
    short = ["--run_dir", str(tmp_path / "run"), "--train.train_iters", "3", "--train.global_batch_size", "2"]
    here = ["--device", "cpu", "--nproc", "1", "--data.cache_dir", str(tmp_path / "cache")]
    program = Program([*command, *short, *here], tmp_path / "out")
    printed = "\n".join(program.communicate())
    assert program.returncode == 0, printed
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "tuned")]) == 0

    def generate(_: Identity) -> None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned", local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", local_files_only=True)
        ids = tokenizer("some words", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=5, do_sample=False)
        found = {"ids": made.tolist()[0], "end": model.generation_config.eos_token_id, "eos": tokenizer.eos_token_id}
        (tmp_path / "found.json").write_text(json.dumps(found))

    run_ranks(1, generate)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["end"], found["eos"]) == (2, 2)
    assert found["ids"][:10] == list(open_tokenizer(imported / "tokenizer.json", "</s>").encode("some words"))
    assert len(found["ids"]) > 10


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"kimi_k2"}))
def test_no_key_that_a_class_of_transformers_reads_is_skipped(said: dict[str, Any], name: str) -> None:
    """By either of its names: whatever stands there is read, or refused."""
    folder, aliases, keys = said["classes"][name]
    assert ARCHITECTURES[name].aliases == aliases
    config = read_configuration(Path(said["root"], folder))
    for key in {*keys, *aliases} - NO_EFFECT:
        with contextlib.suppress(UserError):
            assert key not in unread({**config, key: "no such value"})
