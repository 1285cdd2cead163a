"""Ids: the same as Megatron's, whatever the engine, the workers and the units."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign import param
from data.manifest import read_manifest
from data.shards import Shard
from data.tokenizers import engines
from data.tokenizers.base import open_tokenizer
from data.tokenizers.sentencepiece_engine import PART, WORD, WordsEngine
from data.tokenizers.tiktoken_engine import NEVER, TiktokenEngine
from program.errors import UserError
from tests.tools.preprocess_program import megatron_files, results, shard_bytes
from tools.preprocess.__main__ import main

EOD = "<|endoftext|>"


def silent(line):
    pass


def run(*arguments):
    return main([str(one) for one in arguments])


@pytest.mark.parametrize("engine", ["auto", "tokenizers", param("tiktoken")])
def test_bytes_are_megatrons_with_a_tokenizer_json(texts, lines, tokenizer_json, tmp_path, engine):
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    theirs = HuggingFaceTokenizer(str(tokenizer_json.parent))
    expected = megatron_files(texts, theirs.text_to_ids, theirs.eod, theirs.vocab_size, tmp_path / "theirs")
    flags = ("--tokenizer", tokenizer_json, "--engine", engine, "--merge", "--unit_mb", 0.1)
    assert run(lines, "--output", tmp_path / "ours", *flags) == 0
    assert shard_bytes(tmp_path / "ours_text_document") == expected


def test_bytes_are_megatrons_with_sentencepiece(texts, lines, sentencepiece_model, tmp_path):
    from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import SentencePieceTokenizer

    theirs = SentencePieceTokenizer(str(sentencepiece_model))
    expected = megatron_files(texts, theirs.text_to_ids, theirs.eos_id, theirs.vocab_size, tmp_path / "theirs")
    assert run(lines, "--output", tmp_path / "ours", "--tokenizer", sentencepiece_model, "--merge") == 0
    assert shard_bytes(tmp_path / "ours_text_document") == expected


def test_workers_change_nothing_and_units_only_where_shards_end(lines, tmp_path):
    for workers, name in ((1, "a"), (3, "b")):
        (tmp_path / name).mkdir()
        flags = ("--tokenizer", "byte", "--workers", workers, "--unit_mb", 0.05)
        assert run(lines, "--output", tmp_path / name / "x", *flags) == 0
    assert results(tmp_path / "a") == results(tmp_path / "b")
    many = [shard_bytes(path.with_suffix(""))[0] for path in sorted((tmp_path / "a").glob("*.idx"))]
    assert len(many) > 5
    assert run(lines, "--output", tmp_path / "one", "--tokenizer", "byte") == 0
    assert b"".join(many) == shard_bytes(tmp_path / "one-00000-of-00001")[0]


def test_a_manifest_says_what_is_in_a_shard(texts, lines, tokenizer_json, tmp_path):
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", tokenizer_json) == 0
    shard, tokenizer = Shard(tmp_path / "x-00000-of-00001"), open_tokenizer(tokenizer_json, None)
    manifest = read_manifest(shard.prefix)
    assert (
        (manifest.tokens, manifest.documents) == (shard.token_count, shard.document_count) == (shard.tokens.size, 120)
    )
    assert (manifest.dtype, manifest.vocab_size, manifest.eod) == ("uint16", 1500, 0)
    assert manifest.tokenizer_fingerprint == tokenizer.fingerprint
    assert manifest.source == (f"{lines}[0:{lines.stat().st_size}]",)
    assert manifest.append_eod
    assert manifest.engine == json.loads((tmp_path / "x.preprocess/plan.json").read_text())["engine"] != ""
    assert manifest.counts["text_bytes"] == sum(len(text.encode()) for text in texts)


def test_without_eod_documents_end_in_the_index_only(lines, texts, tmp_path):
    flags = ("--tokenizer", "byte", "--no_append_eod")
    assert run(lines, "--output", tmp_path / "x", *flags) == 0
    shard = Shard(tmp_path / "x-00000-of-00001")
    assert bytes(shard.tokens.astype(np.uint8)) == "".join(texts).encode()
    assert shard.document_lengths().tolist() == [len(text.encode()) for text in texts]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_special_text_stays_text_by_default(tokenizer_json, tmp_path, capsys, engine):
    source = write_lines(tmp_path / "x.jsonl", [f"a {EOD} b", "plain"])
    assert run(source, "--output", tmp_path / "x", "--tokenizer", tokenizer_json, "--engine", engine) == 0
    tokens = Shard(tmp_path / "x-00000-of-00001").tokens.tolist()
    assert tokens.count(0) == 2  # the two that end documents
    assert open_tokenizer(tokenizer_json, None).decode(tokens) == f"a {EOD} bplain"
    assert "1 documents with the text of a control token" in capsys.readouterr().out


def test_special_text_becomes_ids_if_so_asked_as_megatrons(tokenizer_json, tmp_path):
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    texts = [f"a {EOD} b<|pad|>", "plain"]
    theirs = HuggingFaceTokenizer(str(tokenizer_json.parent))
    expected = megatron_files(texts, theirs.text_to_ids, theirs.eod, theirs.vocab_size, tmp_path / "theirs")
    source = write_lines(tmp_path / "x.jsonl", texts)
    flags = ("--tokenizer", tokenizer_json, "--special_tokens", "special")
    assert run(source, "--output", tmp_path / "x", *flags) == 0
    assert shard_bytes(tmp_path / "x-00000-of-00001") == expected


def test_special_text_can_be_a_mistake(tokenizer_json, tmp_path, capsys):
    source = write_lines(tmp_path / "x.jsonl", [f"a {EOD} b", "plain"])
    flags = (source, "--output", tmp_path / "x", "--tokenizer", tokenizer_json, "--special_tokens", "error")
    assert run(*flags) == 2
    assert f"the text of a control token, {EOD}" in capsys.readouterr().err
    assert run(*flags, "--on_bad_document", "skip", "--overwrite") == 0
    assert Shard(tmp_path / "x-00000-of-00001").document_count == 1


def test_special_ids_need_a_tokenizer_that_makes_them(lines, sentencepiece_model, tmp_path, capsys):
    flags = ("--tokenizer", sentencepiece_model, "--special_tokens", "special")
    assert run(lines, "--output", tmp_path / "x", *flags) == 2
    assert "sentencepiece never makes ids" in capsys.readouterr().err


def changed(tokenizer_json, folder, change):
    """A tokenizer.json with something changed."""
    content = json.loads(tokenizer_json.read_text())
    change(content)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return open_tokenizer(path, EOD)


def swap_merges(content):
    merges = content["model"]["merges"]
    merges[10], merges[11] = merges[11], merges[10]


@pytest.mark.parametrize(
    "change, reason",
    [
        (swap_merges, "in the order of their ids"),
        (lambda content: content.update(normalizer={"type": "NFC"}), "no normalizer NFC"),
        (lambda content: content["pre_tokenizer"].update(pretokenizers=content["pre_tokenizer"]["pretokenizers"][:1]),
         "byte-level"),
        (lambda content: content["added_tokens"][1].update(special=False), "not control tokens"),
        (lambda content: content["model"]["merges"].pop(), "no merge does"),
    ],
)  # fmt: skip
def test_tiktoken_is_refused_where_it_would_merge_otherwise(tokenizer_json, tmp_path, change, reason):
    tokenizer = changed(tokenizer_json, tmp_path, change)
    with pytest.raises(UserError, match=reason):
        TiktokenEngine(tokenizer)
    said = []
    assert engines.choose(tokenizer, "auto", False, ["a text"], said.append).name == "tokenizers"
    assert reason in said[0]


def list_every_pair(content):
    """As conversions of tiktoken's own files do, Llama 3's among them: each pair that makes a text, in order of ids."""
    model, vocab = content["model"], content["model"]["vocab"]
    texts = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    model["merges"] = [
        [text[:at], text[at:]]
        for text in texts
        for at in range(1, len(text))
        if text[:at] in vocab and text[at:] in vocab
    ]
    model["ignore_merges"] = True
    assert len(model["merges"]) > 1.2 * len(texts)


def test_tiktoken_takes_texts_that_are_listed_with_each_of_their_pairs(tokenizer_json, tmp_path, texts):
    tokenizer = changed(tokenizer_json, tmp_path, list_every_pair)
    said = []
    engine = engines.choose(tokenizer, "auto", False, texts[:20], said.append)
    assert engine.name == "tiktoken" and "gives the ids of tokenizers" in said[0]
    draw = random.Random(5)
    runs = ["".join(draw.choices(kind, k=draw.randint(2, 30))) for kind in ("ab", "aab ", "  \n", "=-", "the ") * 200]
    assert engines.differs(engine, engines.reference(tokenizer), [*texts, *runs]) is None


def test_auto_falls_back_where_the_sample_shows_other_ids(tokenizer_json, monkeypatch, texts):
    real = TiktokenEngine.encode_batch
    monkeypatch.setattr(
        TiktokenEngine, "encode_batch", lambda self, some: (real(self, some)[0] + 1, real(self, some)[1])
    )
    tokenizer, said = open_tokenizer(tokenizer_json, None), []
    assert engines.choose(tokenizer, "auto", False, texts[:3], said.append).name == "tokenizers"
    assert "gives other ids" in said[0]
    with pytest.raises(UserError, match="engine tiktoken: gives other ids than tokenizers: from token 0 of a document"):
        engines.choose(tokenizer, "tiktoken", False, texts[:3], silent)


def test_engines_give_the_tokenizers_ids_on_odd_texts(tokenizer_json, texts):
    tokenizer = open_tokenizer(tokenizer_json, None)
    odd = [*texts, "", " ", f"{EOD}x", "\ud7ff\ue000", "ſ'ſ K", "a" * 5000, "\n" * 300]
    assert (
        engines.differs(engines.choose(tokenizer, "tiktoken", False, [], silent), engines.reference(tokenizer), odd)
        is None
    )


def test_gigatoken_gives_the_tokenizers_ids(tokenizer_json, texts):
    pytest.importorskip("gigatoken")
    tokenizer = open_tokenizer(tokenizer_json, None)
    engine = engines.choose(tokenizer, "gigatoken", False, texts, silent)
    assert engines.differs(engine, engines.reference(tokenizer), [*texts, f"a{EOD}b"]) is None
    ids, lengths = engine.encode_batch(["ab", f"{EOD}", "c"])
    assert lengths.sum() == len(ids)


@pytest.mark.parametrize("vocab_size", [65_499, 65_500, 65_510, 65_536])
def test_the_dtype_is_read_from_the_file_whatever_the_vocabulary(tmp_path, vocab_size):
    """Megatron writes int32 from 65,500 ids on, and one of its readers takes uint16 up to 65,536."""
    from megatron.core.datasets.indexed_dataset import DType

    from data.shard_writer import ShardWriter

    with ShardWriter(tmp_path / "x", vocab_size) as writer:
        writer.add_documents(np.array([1, vocab_size - 1, 0]), np.array([2, 1]))
    shard = Shard(tmp_path / "x")
    assert shard.dtype == DType.optimal_dtype(vocab_size)
    assert shard.tokens.tolist() == [1, vocab_size - 1, 0]


def test_tiktokens_own_files(tmp_path, lines):
    import base64

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    rows = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (tmp_path / "t.tiktoken").write_text("".join(rows))
    about = {"pat_str": r"\S+|\s+", "special_tokens": {EOD: 300}, "eod": EOD}
    (tmp_path / "t.json").write_text(json.dumps(about))
    source = write_lines(tmp_path / "x.jsonl", [f"the th{EOD}"])
    assert run(source, "--output", tmp_path / "x", "--tokenizer", tmp_path / "t.tiktoken") == 0
    found = Shard(tmp_path / "x-00000-of-00001").tokens.tolist()
    assert found == [257, 32, 256, *EOD.encode(), 300]


def test_a_tokenizer_json_must_say_what_ends_a_document(tokenizer_json, tmp_path, lines, capsys):
    alone = tmp_path / "tokenizer.json"
    content = json.loads(tokenizer_json.read_text())
    for token in content["added_tokens"]:
        token["content"] = token["content"].replace("endoftext", "over")
    content["model"]["vocab"]["<|over|>"] = content["model"]["vocab"].pop(EOD)
    alone.write_text(json.dumps(content))
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", alone) == 2
    assert "nothing says what ends a document" in capsys.readouterr().err
    assert run(lines, "--output", tmp_path / "x", "--tokenizer", alone, "--eod_token", "<|over|>") == 0
    assert Path(f"{tmp_path / 'x'}-00000-of-00001.idx").is_file()


@pytest.fixture(scope="session")
def models(lines, tmp_path_factory):
    """SentencePiece models of pairs, as trained here and with blanks collapsed and one put before; and a unigram's."""
    import io

    import sentencepiece

    found = []
    ours = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True}  # fmt: skip
    for kind, options in (("bpe", ours), ("bpe", {}), ("unigram", {})):
        model = io.BytesIO()
        words = (json.loads(line)["text"] for line in lines.open())
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in words for line in text.splitlines() if line), model_writer=model,
            vocab_size=800, model_type=kind, byte_fallback=True, minloglevel=2, **options,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("models") / f"{kind}.model"
        path.write_bytes(model.getvalue())
        found.append(open_tokenizer(path, None))
    return found


@pytest.fixture(scope="module")
def words_engines(models):
    """Of the models of pairs: the engine that is chosen, and what it must be equal to."""
    return [(engines.choose(each, "auto", False, [], silent), engines.reference(each)) for each in models[:2]]


@settings(max_examples=50)
@given(
    st.lists(st.text(st.sampled_from("ab ,.\t\n\u2581\u00a0\u3000eé你ﬁ\u0301İ👋def=") | st.characters(codec="utf-8")))
)
@pytest.mark.campaign
def test_words_have_the_ids_that_whole_texts_have(words_engines, texts):
    for engine, reference in words_engines:
        assert isinstance(engine, WordsEngine)
        assert engines.differs(engine, reference, [*texts, "  ".join(texts)]) is None


@pytest.mark.campaign
def test_words_on_real_texts(models, texts):
    for tokenizer in models[:2]:
        engine = WordsEngine(tokenizer)
        assert engines.differs(engine, engines.reference(tokenizer), texts) is None


def test_words_are_cut_further_only_where_no_piece_reaches_across(tmp_path, lines, models, texts):
    import io

    import sentencepiece

    assert [WordsEngine(tokenizer)._words for tokenizer in models[:2]] == [PART, PART]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(json.loads(line)["text"][:300] for line in lines.open()), model_writer=model,
        vocab_size=1200, model_type="bpe", byte_fallback=True, split_by_unicode_script=False, split_by_number=False,
        minloglevel=2,
    )  # fmt: skip
    (tmp_path / "t.model").write_bytes(model.getvalue())
    tokenizer = open_tokenizer(tmp_path / "t.model", None)
    engine = WordsEngine(tokenizer)
    assert engine._words is WORD
    assert engines.differs(engine, engines.reference(tokenizer), texts) is None
    engine._words = PART
    assert engines.differs(engine, engines.reference(tokenizer), texts) is not None


def test_a_unigram_model_is_encoded_by_whole_texts(models):
    for tokenizer in models[2:]:
        with pytest.raises(UserError, match="not a byte-pair model"):
            WordsEngine(tokenizer)


def test_pieces_that_reach_over_words_are_encoded_by_whole_texts(tmp_path, lines):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(json.loads(line)["text"][:300] for line in lines.open()), model_writer=model,
        vocab_size=600, model_type="bpe", byte_fallback=True, split_by_whitespace=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "t.model").write_bytes(model.getvalue())
    said = []
    engine = engines.choose(open_tokenizer(tmp_path / "t.model", None), "auto", False, ["a b"], said.append)
    assert not isinstance(engine, WordsEngine)
    assert "reaches over the end of a word" in said[0]


def test_tiktoken_gives_the_ids_of_odd_texts_too(tokenizer_json, texts):
    tokenizer = open_tokenizer(tokenizer_json, None)
    odd = ["", NEVER, f"a {NEVER} b", "<|endoftext|>", "\0", "\ud800 half a pair"]
    engine = TiktokenEngine(tokenizer)
    ids, lengths = engine.encode_batch(odd)
    assert ids.dtype == np.int32 and lengths.tolist()[0] == 0
    for text, found in zip(odd[:-1], np.split(ids, np.cumsum(lengths)[:-1])[:-1], strict=True):
        assert found.tolist() == tokenizer.encode(text).tolist(), text
    assert engine.encode_batch([])[0].tolist() == []
    assert ids[-lengths[-1] :].tolist() == engine._encoding.encode_ordinary(odd[-1])
