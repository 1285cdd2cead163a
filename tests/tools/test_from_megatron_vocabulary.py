"""The rows of the embedding are those that Megatron-LM 0.19.2 makes of the same flags, whatever tokenizer they name."""

import json
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from models.resolve import resolve
from tests.tools.megatron_scripts import NO_VOCABULARY, SMALLEST, drafted, shape_of
from tools.from_megatron.__main__ import main
from tools.from_megatron.convert import convert, read_back


def test_rows_are_padded_as_by_megatron() -> None:
    flags = f"{SMALLEST} --vocab-size 50257 --tokenizer-type NullTokenizer --tensor-model-parallel-size 8"
    assert shape_of(flags).padded_vocab_size == 51200
    assert shape_of(f"{flags} --make-vocab-size-divisible-by 64").padded_vocab_size == 50688


@pytest.mark.parametrize(("rows", "tp"), [(50304, 1), (50304, 8), (32000, 4), (257, 1), (51200, 8), (999999, 3)])
def test_rows_that_are_given_are_those_on_any_layout(rows: int, tp: int) -> None:
    flags = f"{SMALLEST} --hidden-size 192 --num-attention-heads 24 --tensor-model-parallel-size {tp}"
    draft = drafted(f"{flags} --padded-vocab-size {rows} --vocab-size 200 --tokenizer-type NullTokenizer")
    config = read_back(convert(f"{flags} --padded-vocab-size {rows} --tokenizer-type NullTokenizer", "", {})[0])
    assert resolve(config.model, None).padded_vocab_size == rows == draft.values["model.vocab_size"]
    assert not config.problems(tp)


def test_entries_of_a_vocabulary_file_are_counted(tmp_path: Path) -> None:
    table, words = tmp_path / "vocab.json", tmp_path / "words.txt"
    table.write_text(json.dumps({f"t{number}": number for number in range(1234)}))
    words.write_text("a\nb\nc\n")
    assert drafted(f"{SMALLEST} --vocab-file {table} --merge-file m").values["model.vocab_size"] == 1234
    byte_pairs = f"{SMALLEST} --tokenizer-type GPT2BPETokenizer --vocab-file {table} --vocab-size 50257"
    assert drafted(byte_pairs).values["model.vocab_size"] == 1234
    assert any("counts the 1234 ids" in line for line in drafted(byte_pairs).notes)
    pieces = drafted(f"{SMALLEST} --tokenizer-type BertWordPieceCase --vocab-file {words}")
    assert pieces.values["model.vocab_size"] == 3


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /data/gpt2-vocab.json", 50257),
        ("--vocab-file gpt2-vocab.json", 50257),
        ("--tokenizer-type BertWordPieceLowerCase", 30522),
        ("--tokenizer-type BertWordPieceCase", 28996),
        ("--tokenizer-type TikTokenizer --tokenizer-model t.json", 131072),
        ("--tokenizer-type TikTokenizer --tokenizer-model t.json --vocab-size 100000", 100000),
        ("--tokenizer-type NullTokenizer --vocab-size 100", 100),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model /no/such.model", None),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/model", None),
        ("--tokenizer-type SFTTokenizer --tokenizer-model org/model", None),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /no/such.model --no-pad-vocab-size --vocab-size 7", 7),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /mine/vocab.json", None),
    ],
)
def test_ids_of_each_type(flags: str, size: int | None) -> None:
    assert drafted(f"{NO_VOCABULARY} {flags}").values.get("model.vocab_size") == size


def test_a_vocabulary_that_is_not_known_is_left_open() -> None:
    draft = drafted(f"{NO_VOCABULARY} --tokenizer-type GPT2BPETokenizer --vocab-file /mine/vocab.json")
    assert any("model.vocab_size: the entries of --vocab-file /mine/vocab.json" in line for line in draft.open)
    recipe, _ = convert(f"x.py {NO_VOCABULARY} --vocab-file $DATA/gpt2-vocab.json", "", {})
    assert read_back(recipe).model.vocab_size == 50257
    recipe, summary = convert(f"x.py {NO_VOCABULARY} --vocab-file $VOCAB", "", {})
    assert read_back(recipe).data.tokenizer == "$VOCAB"  # a run says that there is no such file
    assert any("--vocab-file $VOCAB, and $VOCAB is not set" in line for block in summary.blocks for line in block)


def test_ids_of_a_model_on_this_machine_are_counted(tmp_path: Path) -> None:
    from data.tokenizers.sentencepiece_training import builtin_model

    model = builtin_model(512, tmp_path, lambda _: None)
    pieces = SentencePieceProcessor(model_file=str(model)).get_piece_size()
    draft = drafted(f"{SMALLEST} --tokenizer-type Llama2Tokenizer --tokenizer-model {model} --vocab-size 128256")
    assert draft.values["model.vocab_size"] == pieces
    assert any(f"counts the {pieces} ids" in line for line in draft.notes)


def test_a_tokenizer_that_is_not_given_is_left_open_where_the_vocabulary_is_known() -> None:
    recipe, summary = convert(f"{SMALLEST} --tokenizer-type SentencePieceTokenizer", "", {})
    assert not summary.complete and "None" not in recipe.partition("[")[0]
    said = "data.tokenizer: --tokenizer-type SentencePieceTokenizer takes --tokenizer-model, which is not given"
    assert any(said in line for block in summary.blocks if block[0] == "Left open:" for line in block)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "no --tokenizer-type, no --vocab-size and no --padded-vocab-size"),
        ("--mock-data", "Add --padded-vocab-size N to the command"),
        ("--tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer takes it from --vocab-size"),
        ("--tokenizer-type MyTok", "--tokenizer-type MyTok is no type of Megatron-LM's"),
        ("--tokenizer-type Llama2Tokenizer", "--tokenizer-type Llama2Tokenizer takes --tokenizer-model"),
        ("--tokenizer-type SFTTokenizer --tokenizer-model org/model", "--tokenizer-type SFTTokenizer"),
        ("--my-tokenizer there", "--my-tokenizer there is no flag of Megatron-LM"),
    ],
)
def test_a_vocabulary_that_nothing_says_is_no_recipe(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And never Triplane's own one, of bytes."""
    assert main([f"{NO_VOCABULARY} {flags}", "--allow_partial"]) == 2
    refused = capsys.readouterr()
    assert "the vocabulary is not known" in refused.err and said in refused.err and not refused.out


def test_a_tokenizer_whose_path_is_open_stands_in_the_recipe_as_in_the_script() -> None:
    flags = f"{NO_VOCABULARY} --tokenizer-type HuggingFaceTokenizer"
    for word in ("$TOK", "$(ls -d /tok)", "your tokenizer path"):
        recipe, summary = convert(f"x.py {flags} --data-path $DATA/a --tokenizer-model {word}", "", {})
        assert read_back(recipe).data.tokenizer == word and not summary.complete
        assert read_back(recipe).data.paths == ("$DATA/a",)
    assert read_back(convert(f"x.py {NO_VOCABULARY} --tokenizer-model a", "", {})[0]).data.tokenizer == "a"


def test_a_type_that_is_not_known_is_called_so() -> None:
    draft = drafted(f"{SMALLEST} --tokenizer-type MyTok --vocab-size 1000")
    assert draft.values["model.vocab_size"] == 1000
    assert any("Megatron-LM 0.19.2 has no such type" in line for line in draft.unsupported)


def test_the_null_multimodal_tokenizer_has_one_id_more() -> None:
    assert shape_of(f"{SMALLEST} --tokenizer-type NullMultimodalTokenizer --vocab-size 1024").padded_vocab_size == 1152


def test_a_size_that_cannot_be_checked_is_said() -> None:
    draft = drafted(f"{SMALLEST} --tokenizer-type Llama2Tokenizer --tokenizer-model /no/t.model --vocab-size 32000")
    assert draft.values["model.vocab_size"] == 32000
    assert any("which is not on this machine" in line for line in draft.notes)
