"""GPT-2's two files, Meta's tokenizer.model and folders of the Hub give the ids of the libraries that made them."""

import base64
import json
import os
import shutil
from pathlib import Path

import pytest

from data import corpus
from data.config import DataConfig
from data.tokenizers import base, engines, sentencepiece_training
from data.tokenizers.base import SentencePieceTokenizer, TiktokenTokenizer, open_named, open_tokenizer
from data.tokenizers.gpt2_pair import PairTokenizer
from data.tokenizers.tiktoken_meta import LLAMA3_PATTERN, encoding_of
from data.tokenizers.tokenizer_json import JsonTokenizer
from program.errors import UserError
from tools.preprocess.__main__ import main

EOD = "<|endoftext|>"
AWKWARD = [
    "", " ", "\n", "a", "  two  blanks ", "\ttabs\r\n\r\nlines\n\n\n", "Grüße, 你好 👋🏽 \u200d \u00a0",
    "e\u0301 é ﬁ İ ſ 'ſ", "don't I'LL she'S we'Ve", "1234567 12 1,000 x=1", f"a {EOD} b<|eot_id|>", "\x00\x01\x7f",
    "\ufeffmark", "ا‎ب‏ हिन्दी ไทย", "x" * 5000, " " * 5000, "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def texts():
    return [*AWKWARD, *(path.read_text()[:3000] for path in corpus.files(max_bytes=1_500_000))][:80]


@pytest.fixture(scope="module")
def pair(texts, tmp_path_factory):
    """A folder with vocab.json and merges.txt of byte-level BPE, as GPT-2's."""
    from tokenizers import ByteLevelBPETokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = tmp_path_factory.mktemp("gpt2")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=700, special_tokens=[EOD], show_progress=False)
    trained.save_model(str(folder))
    return folder


def copied(folder, target, **renamed):
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        shutil.copy(path, target / renamed.get(path.stem, path.name))
    return target


def test_a_pair_gives_the_ids_of_transformers(pair, texts):
    from transformers import GPT2Tokenizer

    theirs, ours = GPT2Tokenizer.from_pretrained(pair), open_tokenizer(pair, None)
    assert isinstance(ours, PairTokenizer) and ours.eod == theirs.eos_token_id == 0
    plain = [text for text in texts if EOD not in text]
    assert [ours.encode(text).tolist() for text in plain] == [theirs(text)["input_ids"] for text in plain]
    assert EOD in ours.special_texts and ours.eod not in ours.encode(f"a {EOD} b")
    assert [ours.decode(ours.encode(text)) for text in texts] == texts
    fast = engines.choose(ours, "auto", False, texts, lambda line: None)
    assert fast.name == "tiktoken" and engines.differs(fast, engines.reference(ours), texts) is None


def test_a_pair_of_qwen2_splits_as_qwen2(pair, texts, tmp_path):
    from transformers import Qwen2Tokenizer

    folder = copied(pair, tmp_path / "qwen")
    vocabulary = json.loads((folder / "vocab.json").read_text())
    added = {"<|im_start|>": len(vocabulary), "<tool>": len(vocabulary) + 1}
    decoder = {
        str(index): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                     "special": text == "<|im_start|>"}
        for text, index in {EOD: 0, **added}.items()
    }  # fmt: skip
    decoder["0"]["special"] = True
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": EOD, "pad_token": EOD, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = Qwen2Tokenizer.from_pretrained(folder), open_tokenizer(folder, None)
    assert ours.vocab_size == len(theirs) == len(vocabulary) + 2
    plain = [*(text for text in texts if EOD not in text), "a<tool>b <tool>"]
    assert [ours.encode(text).tolist() for text in plain] == [theirs(text)["input_ids"] for text in plain]
    assert set(ours.special_texts) == {EOD, "<|im_start|>"}


@pytest.mark.parametrize(
    "names",
    [
        "vocab.json", "merges.txt", "gpt2-vocab.json", "gpt2-merges.txt", "encoder.json", "vocab.bpe",
        "words.json,rules", "{folder}/words.json,{folder}/rules",
    ],
)  # fmt: skip
def test_either_file_or_both_name_a_pair(pair, tmp_path, monkeypatch, names):
    expected = open_tokenizer(pair, None)
    vocabulary, merges = {
        "v": ("vocab.json", "merges.txt"), "m": ("vocab.json", "merges.txt"),
        "g": ("gpt2-vocab.json", "gpt2-merges.txt"),
        "e": ("encoder.json", "vocab.bpe"), "w": ("words.json", "rules"), "{": ("words.json", "rules"),
    }["e" if names == "vocab.bpe" else names[0]]  # fmt: skip
    shutil.copy(pair / "vocab.json", tmp_path / vocabulary)
    shutil.copy(pair / "merges.txt", tmp_path / merges)
    monkeypatch.chdir(tmp_path)
    assert open_named(names.format(folder=tmp_path), None).fingerprint == expected.fingerprint
    assert base.load(DataConfig(tokenizer=names.format(folder=tmp_path)), tmp_path, print).eod == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"merges.txt": None}, "holds no tokenizer.json, no vocab.json with merges.txt"),
        ({"merges.txt": "#version: 0.2\na b c\n"}, "merges.txt:2: expected two pieces with a blank between"),
        ({"merges.txt": "#version: 0.2\nnot there\n"}, "is not a pair of vocabulary and merges"),
        ({"merges.txt": b"#version: 0.2\n\xff \xfe\n"}, "merges.txt: byte 14 is not UTF-8"),
        ({"vocab.json": '{"a": 0, "b": 1}'}, "no id for 254 of the 256 bytes"),
        ({"vocab.json": '{"a": 0, "b": "1"}'}, "expected an object of texts and their ids"),
        ({"vocab.json": '{"a": 0, "b": 0}'}, "expected another id for each text"),
        ({"vocab.json": ""}, "vocab.json is empty"),
        ({"tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer"}'}, "says CLIPTokenizer; expected GPT-2's"),
        ({"tokenizer_config.json": '{"eos_token": "<end>"}'}, 'no token "<end>", which ends a document by'),
        ({"tokenizer_config.json": "{"}, "not JSON"),
    ],
    ids=str,
)
def test_a_pair_that_is_none_is_named(pair, tmp_path, changes, said):
    folder = copied(pair, tmp_path / "x")
    for name, content in changes.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match="tokenizer: ") as stopped:
        open_tokenizer(folder, None)
    assert said in str(stopped.value)


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """A folder with a tokenizer.model as Meta's."""
    return write_llama3(tmp_path_factory.mktemp("llama3"))


def write_llama3(folder):
    """128,000 ranks as Meta's file has them: the bytes, and what pairs of earlier ones make."""
    order = [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173]
    known = dict.fromkeys(bytes([byte]) for byte in order)
    words = sorted({word for path in corpus.files(max_bytes=1_500_000) for word in path.read_bytes().split()})
    for length in (2, 3, 4, 5, 6):
        for word in (b" " + word for word in words):
            if len(known) == 128_000:
                break
            if word[: length - 1] in known:
                known[word[:length]] = None
    for first in range(256):
        for second in range(256):
            for third in (32, 97):
                if len(known) < 128_000:
                    known[bytes([first, second])] = None
                    if len(known) < 128_000:
                        known[bytes([first, second, third])] = None
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(known))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


@pytest.mark.campaign
def test_metas_file_gives_the_ids_of_tiktoken_and_transformers(llama3, texts):
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ours = open_tokenizer(llama3, None)
    assert isinstance(ours, TiktokenTokenizer)
    assert (ours.vocab_size, ours.eod) == (128_256, 128_001)
    ranks = load_tiktoken_bpe(str(llama3 / "tokenizer.model"))
    assert len(ranks) == 128_000
    theirs = TikTokenConverter(str(llama3 / "tokenizer.model"))  # its default pattern is Llama 3's
    encoding = tiktoken.Encoding("x", pat_str=theirs.pattern, mergeable_ranks=ranks, special_tokens={})
    assert [ours.encode(text).tolist() for text in texts] == [encoding.encode_ordinary(text) for text in texts]
    converted = theirs.converted()
    assert [ours.encode(text).tolist() for text in texts] == [
        converted.encode(text, add_special_tokens=False).ids for text in texts
    ]
    assert [ours.decode(ours.encode(text)) for text in texts] == texts
    assert open_tokenizer(llama3, "<|eot_id|>").eod == 128_009
    with pytest.raises(UserError, match='no "<s>", which should end documents'):
        open_tokenizer(llama3, "<s>")


def test_metas_control_tokens_are_where_meta_has_them():
    """Beginnings and ends of the ranges in meta-llama/llama-models, models/llama3 and models/llama4/tokenizer.py."""
    llama3, llama4 = encoding_of(128_000), encoding_of(200_000)
    assert llama3 is not None and llama4 is not None
    places = {
        "<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|reserved_special_token_0|>": 128002,
        "<|finetune_right_pad_id|>": 128004, "<|start_header_id|>": 128006, "<|eom_id|>": 128008, "<|eot_id|>": 128009,
        "<|python_tag|>": 128010, "<|reserved_special_token_5|>": 128010, "<|reserved_special_token_250|>": 128255,
    }  # fmt: skip
    assert {text: llama3.special_tokens[text] for text in places} == places
    assert set(llama3.special_tokens.values()) == set(range(128_000, 128_256))
    places = {
        "<|begin_of_text|>": 200000, "<|end_of_text|>": 200001, "<|fim_suffix|>": 200004, "<|header_start|>": 200005,
        "<|eot|>": 200008, "<|finetune_right_pad|>": 200018, "<|text_post_train_reserved_special_token_68|>": 200079,
        "<|image_start|>": 200080, "<|patch|>": 200092, "<|vision_reserved_special_token_1047|>": 201133,
        "<|reasoning_thinking_end|>": 201143, "<|reserved_special_token_0|>": 201144,
    }  # fmt: skip
    assert {text: llama4.special_tokens[text] for text in places} == places
    assert sorted(llama4.special_tokens.values()) == list(range(200_000, 202_048))
    assert llama4.pattern == (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
        r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
        r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    )


def test_ranks_that_nothing_describes_are_refused(llama3, tmp_path):
    lines = (llama3 / "tokenizer.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:100_000]))
    with pytest.raises(UserError, match=r"100,000 of tiktoken's ranks and no description beside; expected 128,000"):
        open_tokenizer(tmp_path, None)


def hub_folder(target, tokenizer_json=None):
    """A folder as the Hub has them: chat templates and weights lie there too."""
    target.mkdir()
    if tokenizer_json is not None:
        shutil.copy(tokenizer_json, target / "tokenizer.json")
    (target / "chat_template.jinja").write_text("{{ messages }}")
    (target / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": EOD, "lstrip": False}}))
    (target / "config.json").write_text('{"model_type": "gpt2"}')
    (target / "README.md").write_text("a model")
    return target


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    """The same pair, as its tokenizer.json."""
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    path.write_bytes(open_tokenizer(pair, None).raw)
    return path


def test_a_folder_of_the_hub(pair, saved, llama3, texts, tmp_path):
    folder = hub_folder(tmp_path / "a", saved)
    opened = open_tokenizer(folder, None)
    assert isinstance(opened, JsonTokenizer) and opened.eod == 0
    assert opened.fingerprint == open_tokenizer(pair, None).fingerprint
    copied(pair, folder)
    shutil.copy(llama3 / "tokenizer.model", folder)
    assert type(open_tokenizer(folder, None)) is JsonTokenizer  # before what it was converted of
    (folder / "tokenizer.json").unlink()
    assert isinstance(open_tokenizer(folder, None), PairTokenizer)
    (folder / "merges.txt").unlink()
    assert isinstance(open_tokenizer(folder, None), TiktokenTokenizer)
    (folder / "tokenizer.model").write_bytes(sentencepiece_training.train(corpus.files()[:20], 600))
    assert isinstance(open_tokenizer(folder, None), SentencePieceTokenizer)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json.*found: README\.md, chat_template\.jinja, config"):
        open_tokenizer(folder, None)


@pytest.mark.parametrize("name", ["tokenizer.model", "t.bin", "t", "t.json"])
def test_a_tokenizer_is_known_by_its_content(name, saved, llama3, tmp_path):
    pieces = sentencepiece_training.train(corpus.files()[:20], 600)
    for content, kind in (
        (saved.read_bytes(), JsonTokenizer),
        (pieces, SentencePieceTokenizer),
        ((llama3 / "tokenizer.model").read_bytes(), TiktokenTokenizer),
    ):
        (tmp_path / name).write_bytes(content)
        assert type(open_tokenizer(tmp_path / name, None)) is kind


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.model", b"", "is empty"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS"),
        ("tokenizer_config.json", b'{"eos_token": "</s>"}', "holds settings, no tokenizer. Give its folder"),
        ("tokenizer.json", b'{"a": [', "is not a tokenizer.json"),
        ("tokenizer.model", b"<!DOCTYPE html>", "is not a SentencePiece model"),
        ("x.txt", b"some words\nof prose, no merges\n", "is not a SentencePiece model"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path, capfd, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        open_tokenizer(tmp_path / name, None)
    assert capfd.readouterr() == ("", "")
    (tmp_path / "in.txt").write_text("text")
    assert main([str(tmp_path / "in.txt"), "--output", str(tmp_path / "o"), "--tokenizer", str(tmp_path / name)]) == 2
    assert said in capfd.readouterr().err and not list(tmp_path.glob("o-*"))


def test_what_a_checkpoint_keeps_opens_as_the_same_tokenizer(pair, saved, llama3, tmp_path):
    pieces, ranks = tmp_path / "p.bin", tmp_path / "r.tiktoken"
    pieces.write_bytes(sentencepiece_training.train(corpus.files()[:20], 600))
    lines = (llama3 / "tokenizer.model").read_bytes().splitlines(keepends=True)
    ranks.write_bytes(b"".join(lines[:1000]))
    description = {"pat_str": LLAMA3_PATTERN, "special_tokens": {EOD: 1000}, "eod": EOD}
    ranks.with_suffix(".json").write_text(json.dumps(description))
    for number, path in enumerate((pair, saved, llama3, pieces, ranks, ranks.with_suffix(".json"))):
        tokenizer = open_tokenizer(path, None)
        kept = base.carried(tokenizer)
        folder = tmp_path / f"kept{number}"
        folder.mkdir()
        for name, source in kept.copies.items():
            shutil.copy(source, folder / name)
        for name, text in kept.texts.items():
            (folder / name).write_text(text)
        assert open_tokenizer(folder / kept.name, None).fingerprint == tokenizer.fingerprint
        assert open_tokenizer(folder, None).fingerprint == tokenizer.fingerprint
    assert base.carried(base.ByteTokenizer()).name == "byte"
    assert Path(kept.name).suffix == ".tiktoken"


def test_documents_are_preprocessed_with_each(pair, llama3, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "one text"}\n{"text": "another"}\n')
    for number, name in enumerate((str(pair), f"{pair}/vocab.json,{pair}/merges.txt", str(llama3 / "tokenizer.model"))):
        output = tmp_path / f"o{number}"
        assert main([str(tmp_path / "in.jsonl"), "--output", str(output), "--tokenizer", name]) == 0
