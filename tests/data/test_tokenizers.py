import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import corpus
from data.config import DataConfig
from data.tokenizers import base, sentencepiece_training
from data.tokenizers.base import ByteTokenizer, SentencePieceTokenizer
from program.errors import UserError

TEXTS = [
    "",
    "a",
    "héllo wörld",
    "日本語 🎉👩‍👩‍👧",
    "\ttabs\r\n\n  and  blanks \n",
    "\0",
    "a </s> <s> <unk> <0x41> b",
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(sentencepiece_training.train(corpus.files()[:60], 600))
    return path


@pytest.fixture(scope="module")
def pieces(model_path):
    return SentencePieceTokenizer(model_path)


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


@given(text=st.text().filter(lambda text: "\u2581" not in text))
def test_pieces_round_trip(pieces, text):
    assert pieces.decode(pieces.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_becomes_a_control_id(pieces, text):
    ids = pieces.encode(text)
    assert ids.dtype == np.int32
    assert pieces.decode(ids) == text
    assert not {0, 1, 2} & set(ids.tolist())
    assert pieces.decode([*ids, pieces.eod]) == text


def test_sizes_and_ends(pieces):
    assert (ByteTokenizer.vocab_size, ByteTokenizer.eod) == (257, 256)
    assert (pieces.vocab_size, pieces.eod) == (600, 2)


def test_training_gives_the_same_bytes_each_time(model_path):
    again = sentencepiece_training.train(corpus.files()[:60], 600)
    assert again == model_path.read_bytes()
    assert str(corpus.files()[0].parent).encode() not in again


def test_training_is_silent(capfd):
    sentencepiece_training.train(corpus.files()[:10], 600)
    assert capfd.readouterr() == ("", "")


def test_fingerprint_tells_models_apart(pieces, model_path, tmp_path):
    other = tmp_path / "other.model"
    other.write_bytes(sentencepiece_training.train(corpus.files()[:60], 601))
    assert SentencePieceTokenizer(model_path).fingerprint == pieces.fingerprint
    assert len({SentencePieceTokenizer(other).fingerprint, pieces.fingerprint, ByteTokenizer.fingerprint}) == 3


def test_it_can_be_sent_to_a_spawned_process(pieces):
    copy = pickle.loads(pickle.dumps(pieces))
    assert copy.encode("def f():").tolist() == pieces.encode("def f():").tolist()
    assert copy.fingerprint == pieces.fingerprint


def test_a_model_is_loaded_by_path(model_path, pieces, tmp_path):
    loaded = base.load(DataConfig(tokenizer=str(model_path)), tmp_path, print)
    assert loaded.fingerprint == pieces.fingerprint
    assert loaded.path == model_path


def test_a_missing_or_broken_model_is_named(tmp_path, capfd):
    with pytest.raises(UserError, match=r"no file .*x\.model"):
        base.load(DataConfig(tokenizer=str(tmp_path / "x.model")), tmp_path, print)
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"x\.model is not a SentencePiece model"):
        base.load(DataConfig(tokenizer=str(tmp_path / "x.model")), tmp_path, print)
    assert capfd.readouterr() == ("", "")
