"""What is imported trains on its own tokenizer's ids, and what is exported after that knows how texts end."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from campaign import some
from data.config import DataConfig
from data.tokenizers.base import open_tokenizer
from models.families import TINY
from parallel.launch import Identity
from program.errors import UserError
from ranks import run_ranks
from runs import configuration, train
from tests.data.test_tokenizer_files import write_llama3
from tests.tools.hf_folders import write_folder
from tools.convert.__main__ import main
from tools.convert.generation import more_files, with_ends
from tools.shared.carried_tokenizer import own_ends
from tools.shared.hf_folder.source import HfFolder
from training.checkpoint.folders import checkpoints, latest
from training.checkpoint.state import read_state
from training.config.recipe import load
from training.config.run_config import RunConfig
from training.start import prepare

BOS, EOS, EOT = "<|begin|>", "<|end|>", "<|turn|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}"
SHAPE = dataclasses.replace(TINY["llama2_tiny"], vocab_size=300)
SIDE = {
    "generation_config.json": json.dumps({"bos_token_id": 0, "eos_token_id": [1, 2], "temperature": 0.6}, indent=3),
    "tokenizer_config.json": json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    ),
    "special_tokens_map.json": json.dumps({"bos_token": BOS, "eos_token": EOS}),
    "chat_template.jinja": TEMPLATE,
    "LICENSE": "as is",
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer.json of 259 ids; 0 begins a text, 1 ends it, 2 ends a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [BOS, EOS, EOT, *alphabet]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (BOS, EOS, EOT)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A folder with all that a chat model has."""
    write_folder(tmp_path / "hf", SHAPE, config={"bos_token_id": 0, "eos_token_id": 1})
    write_tokenizer(tmp_path / "hf")
    for name, text in SIDE.items():
        (tmp_path / "hf" / name).write_text(text)
    return tmp_path / "hf"


def converted(direction: str, source: Path, target: Path) -> Path:
    flags = ["--no_logits"] if direction == "import" else []
    assert main([direction, *flags, str(source), str(target)]) == 0
    return target


def trained(recipe: Path, run_dir: Path, texts: Path, *flags: str) -> Path:
    """The checkpoint of an iteration."""
    short = ("--train.train_iters", "1", "--train.global_batch_size", "2", "--model.seq_length", "32", "--nproc", "1")
    data = ("--data.paths", str(texts), "--data.cache_dir", str(run_dir.with_name("cache")), "--data.split", "1")
    config = configuration(run_dir, *short, *data, "--device", "cpu", *flags, recipe=recipe)
    train(prepare.prepare(config, None), config, 1)
    found = latest(checkpoints(run_dir))
    assert found is not None
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": "some words " * 20}) for _ in range(20)))
    return tmp_path / "texts.jsonl"


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Its classes of this file once, here, and not in every forked process."""
    import transformers

    for name in ("AutoTokenizer", "AutoModelForCausalLM", "LlamaForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)
    return transformers


def in_transformers(transformers: Any, folder: Path) -> dict[str, Any]:
    """What transformers makes of a folder: the ids that end its generation, and of a text."""

    def look(_: Identity) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        found = {
            "ends": model.generation_config.eos_token_id,
            "eos": tokenizer.eos_token_id,
            "ids": tokenizer("Some words.", add_special_tokens=False)["input_ids"],
            "chat": bool(tokenizer.chat_template),
        }
        folder.with_suffix(".json").write_text(json.dumps(found))

    run_ranks(1, look)
    found: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text())
    return found


@pytest.mark.campaign
def test_a_trained_model_ends_its_texts_as_the_imported_one_did(
    tmp_path: Path, hf: Path, texts: Path, transformers: Any
) -> None:
    """Over two runs: the second starts from the first one's checkpoint."""
    imported = converted("import", hf, tmp_path / "imported")
    recipe = (imported / "config.toml").read_text()
    assert 'tokenizer = "tokenizer.json"' in recipe
    assert f'eod_token = "{EOS}"' in recipe
    first = trained(
        imported / "config.toml", tmp_path / "first", texts, "--checkpoint.load", str(imported), "--checkpoint.finetune"
    )
    second = trained(
        first / "config.toml", tmp_path / "second", texts, "--checkpoint.load", str(first), "--checkpoint.finetune"
    )
    assert read_state(second).entries["imported"] == {"source": "hf", "model_type": "llama"}
    exported = converted("export", second, tmp_path / "out")
    for name in (*SIDE, "tokenizer.json"):
        assert (exported / name).read_bytes() == (hf / name).read_bytes(), name
    with HfFolder(exported) as source:
        assert (source.config["bos_token_id"], source.config["eos_token_id"]) == (0, 1)
    found = in_transformers(transformers, exported)
    assert (found["ends"], found["eos"], found["chat"]) == ([1, 2], 1, True)


@pytest.mark.parametrize("kind", some(["json", "sentencepiece", "byte"], ["sentencepiece"]))
def test_a_model_of_our_own_ends_its_texts_as_its_documents(
    tmp_path: Path, texts: Path, kind: str, hf: Path, transformers: Any
) -> None:
    """Nothing lies beside its tokenizer."""
    (tmp_path / "own").mkdir()
    flags = {"byte": ("byte",), "sentencepiece": ("builtin", "--data.builtin_vocab_size", "512")}.get(kind, ())
    if kind == "json":
        (hf / "tokenizer.json").rename(tmp_path / "own" / "tokenizer.json")
        flags = (str(tmp_path / "own" / "tokenizer.json"), "--data.eod_token", EOS)
    recipe = Path("slurm/recipes/debug.toml")
    checkpoint = trained(recipe, tmp_path / "run", texts, "--model.shape", "llama2_tiny", "--data.tokenizer", *flags)
    exported = converted("export", checkpoint, tmp_path / "out")
    eod = {"json": 1, "byte": 256}.get(kind, 2)
    generation = json.loads((exported / "generation_config.json").read_text())
    with HfFolder(exported) as source:
        assert generation["eos_token_id"] == source.config["eos_token_id"] == eod
    if kind != "byte":
        found = in_transformers(transformers, exported)
        assert (found["ends"], found["eos"]) == (eod, eod)
        name = "tokenizer.json" if kind == "json" else "tokenizer.model"
        assert found["ids"] == list(open_tokenizer(checkpoint / name, EOS).encode("Some words."))


@pytest.mark.campaign
def test_llama_3s_ranks_have_their_control_tokens_in_transformers(tmp_path: Path, transformers: Any) -> None:
    """They are not in Meta's tokenizer.model."""
    carried = {"tokenizer.model": write_llama3(tmp_path) / "tokenizer.model"}
    checkpoint = RunConfig(data=DataConfig(tokenizer=str(carried["tokenizer.model"])))
    ends, notes = own_ends(tmp_path, checkpoint, {})
    assert ends is not None and (ends.eos, ends.bos, notes) == (128_001, 128_000, [])
    config = with_ends({"model_type": "llama"}, carried, ends)
    for name, content in more_files(config, carried, ends).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def look(_: Identity) -> None:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        ids = theirs("some words<|eot_id|>", add_special_tokens=False)["input_ids"]
        (tmp_path / "found").write_text(json.dumps([len(theirs), theirs.eos_token_id, theirs.bos_token_id, *ids]))

    run_ranks(1, look)
    plain = open_tokenizer(carried["tokenizer.model"], None).encode("some words").tolist()
    assert json.loads((tmp_path / "found").read_text()) == [128_256, 128_001, 128_000, *plain, 128_009]


CHOICES: dict[str, tuple[dict[str, str | None], dict[str, Any], str | None]] = {
    "tokenizer_config.json": ({}, {}, EOS),
    "generation_config.json": ({"tokenizer_config.json": None}, {}, EOS),
    "config.json": ({"tokenizer_config.json": None, "generation_config.json": None}, {"eos_token_id": 2}, EOT),
    "special_tokens_map.json": (
        {"tokenizer_config.json": None, "generation_config.json": None}, {"eos_token_id": None}, EOS,
    ),
    "nothing": (
        {"tokenizer_config.json": None, "generation_config.json": None, "special_tokens_map.json": None},
        {"eos_token_id": None}, None,
    ),
    "an end that it lacks": ({"tokenizer_config.json": '{"eos_token": "<|no|>"}'}, {}, EOS),
    "no tokenizer.json": ({"tokenizer.json": "{}"}, {}, None),
    "no file": ({"tokenizer.json": None}, {}, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHOICES)
def test_what_ends_a_document_is_what_the_folder_says(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    files, changes, expected = CHOICES[kind]
    for name, text in files.items():
        (hf / name).unlink() if text is None else (hf / name).write_text(text)
    (hf / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | changes))
    imported = converted("import", hf, tmp_path / "imported")
    data = load(imported / "config.toml").data
    said = capsys.readouterr().out
    if expected is None:
        assert data.tokenizer == "byte"
        assert "note: no tokenizer of its own can be used: " in said
        assert "# None of its own tokenizer's files can be used: " in (imported / "config.toml").read_text()
    else:
        assert data.eod_token == expected
        assert Path(data.tokenizer) == imported / "tokenizer.json"
        assert "no tokenizer" not in said


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 10**5], ids=range(3))
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_beside_the_tokenizer_that_cannot_be_read_is_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (hf / name).write_text(text)
    assert main(["import", "--no_logits", str(hf), str(tmp_path / "imported")]) == 2
    assert capsys.readouterr().err.startswith(f"tools.convert: {hf / name}: ")
    assert not list(tmp_path.glob("imported*"))


def test_an_end_that_is_no_text_is_refused(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hf / "tokenizer_config.json").write_text('{"eos_token": 1}')
    assert main(["import", "--no_logits", str(hf), str(tmp_path / "imported")]) == 2
    assert "tokenizer_config.json: eos_token: expected a string or an object, found 1." in capsys.readouterr().err


def test_imported_weights_do_not_train_on_raw_text_in_other_ids(tmp_path: Path, hf: Path, texts: Path) -> None:
    """Whatever the recipe and the text, also from a checkpoint of a run that started from them."""
    imported = converted("import", hf, tmp_path / "imported")
    load_from = ("--checkpoint.finetune", "--checkpoint.load")
    first = trained(imported / "config.toml", tmp_path / "first", texts, *load_from, str(imported))
    for folder, tokenizer, text in (
        (imported, "byte", ("--data.paths", str(texts))), (imported, "builtin", ("--data.stream", str(texts))),
        (first, "byte", ("--data.stream", str(texts))), (first, "builtin", ("--data.paths", str(texts))),
        (first, "byte", ()),
    ):  # fmt: skip
        flags = (*load_from, str(folder), "--data.tokenizer", tokenizer, *text)
        with pytest.raises(UserError, match=f'data.tokenizer = "{tokenizer}": the weights of {folder} were imported'):
            prepare.prepare(configuration(tmp_path / "run", *flags), None)
