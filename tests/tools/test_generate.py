"""tools.generate: text alone on stdout, files and lines of prompts, what ends a text, and what is refused."""

import dataclasses
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from data.prepared import Prepared
from data.tokenizers.base import ByteTokenizer
from models.families import TINY
from program.errors import UserError
from programs import Program
from runs import configuration, train
from tests.tools.hf_folders import write_folder
from tests.tools.test_convert_training import EOS, SIDE, write_tokenizer
from tools.convert.importing import import_folder
from tools.generate.__main__ import Generate, job_of, main
from tools.generate.prompts import Prompt
from tools.generate.work import Job, answer, converse
from tools.shared.loaded_model import LoadedModel, on_ranks
from tools.shared.opened_checkpoint import ModelFlags, open_checkpoint
from training.generation.settings import Sampling, TextLimits
from training.generation.texts import prompt_ids

LARGE = (
    "--train.train_iters", "1", "--optimizer.lr", "1e-9", "--model.init_method_std", "0.15", "--train.seed", "1",
    "--model.seq_length", "64",
)  # fmt: skip
LAST = "iter_0000001"
PROMPTS = ("def read(self, path):\n", "import os\n\n", "naïve — ", "class A(")
GREEDY = ("--temperature", "0", "--max_new_tokens", "20")


@pytest.fixture(scope="module")
def run(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder; its weights are large enough that texts differ."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    train(prepared, configuration(folder, *LARGE), 1)
    return folder


@pytest.fixture(scope="module")
def texts(run: Path) -> list[str]:
    """Greedy texts of PROMPTS, by the tool, one at a time in its memory, on one rank."""
    file = run.parent / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"id": number, "prompt": text}) for number, text in enumerate(PROMPTS)))
    lines = [json.loads(line) for line in generate(run, "--file", file, *GREEDY, "--batch_size", "1")[0].splitlines()]
    assert [(line["id"], line["prompt"], line["finish_reason"], line["tokens"]) for line in lines] == [
        (number, text, "length", 20) for number, text in enumerate(PROMPTS)
    ]
    found = [line["text"] for line in lines]
    assert len(set(found)) > 1
    return found


def generate(checkpoint: Path, *flags: object, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of the program."""
    program = Program([str(checkpoint), *map(str, flags)], checkpoint.parent / "printed", module="tools.generate")
    out, err = program.communicate()
    assert program.returncode == code, err
    return out, err


def test_a_prompts_text_alone_is_printed_in_any_layout(run: Path, texts: list[str]) -> None:
    out, err = generate(run, "--prompt", PROMPTS[0], *GREEDY)
    assert out == f"{texts[0]}\n"
    assert f"{LAST} (debug: 4 layers, hidden 64), TP 1 x PP 1 x DP 1 on cpu, fp32; greedy\n" in err
    assert "20 tokens in " in err
    for flags in (("--layout", "tp2sp"), ("--no_cache", "--stream"), ("--layout", "cp2")):
        assert generate(run / "checkpoints" / LAST, "--prompt", PROMPTS[0], *GREEDY, *flags)[0] == out, flags


def test_a_file_of_lines_in_one_batch_over_two_replicas(run: Path, texts: list[str]) -> None:
    file = run.parent / "lines.txt"
    file.write_text("".join(f"{text}\n\n" for text in ("naïve — ", "class A(", "class A(")))
    flags = ("--file", file, "--layout", "dp2pp2", "--format", "text", *GREEDY)
    assert generate(run, *flags)[0] == f"{texts[2]}\n---\n{texts[3]}\n---\n{texts[3]}\n"


def test_stop_texts_and_end_ids_end_a_text(run: Path, tmp_path: Path) -> None:
    drawn = ("--prompt", "import ", "--max_new_tokens", "40", "--temperature", "1")
    whole = generate(run, *drawn)[0]
    at = next(place for place in range(5, 40) if whole[place].isascii() and whole[place] not in whole[:place])
    stop, cut = whole[at : at + 2], whole[:at]
    assert generate(run, *drawn, "--stream", "--stop", "~~", stop)[0] == f"{cut}\n"
    record = json.loads(generate(run, *drawn, "--format", "jsonl", "--stop", "~~", stop)[0])
    assert (record["text"], record["finish_reason"]) == (cut, "stop") and record["tokens"] < 40
    folder = Path(shutil.copytree(run / "checkpoints" / LAST, tmp_path / LAST))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, ord(stop[0])]}))
    record = json.loads(generate(folder, *drawn, "--format", "jsonl")[0])
    assert (record["text"], record["finish_reason"]) == (cut, "end") and at <= record["tokens"] < 40


@pytest.mark.campaign
def test_the_seed_gives_the_text(run: Path, texts: list[str]) -> None:
    flags = ("--prompt", PROMPTS[0], "--max_new_tokens", 20)
    one, again, other = (generate(run, *flags, *more)[0] for more in ((), ("--seed", 0), ("--seed", 5)))
    assert one == again != other
    assert generate(run, *flags, "--top_k", 1)[0] == f"{texts[0]}\n"


def test_an_imported_model_begins_and_ends_texts_with_its_own_ids(tmp_path: Path) -> None:
    """Of tokenizer.json and generation_config.json; text in the prompt that looks like one stays text."""
    shape = dataclasses.replace(TINY["llama2_tiny"], vocab_size=300)
    write_folder(tmp_path / "hf", shape)
    write_tokenizer(tmp_path / "hf")
    for name, text in SIDE.items():
        (tmp_path / "hf" / name).write_text(text)
    import_folder(tmp_path / "hf", tmp_path / "checkpoint", dtype=None, workers=1, max_file_bytes=1 << 30)
    flags = Generate(checkpoint=tmp_path / "checkpoint", prompt=f"{EOS}a", bos=True, device="cpu")
    opened = open_checkpoint(flags)
    made = job_of(flags, opened)
    assert (made.begin, sorted(made.limits.ends)) == (0, [1, 2]) and opened.tokenizer is not None
    ids = prompt_ids(opened.tokenizer, f"{EOS}a", made.begin)
    assert ids[0] == 0 and 1 not in ids and opened.tokenizer.decode(ids) == f"{EOS}a"
    asked = (tmp_path / "checkpoint", "--prompt", "a", "--max_new_tokens", "8")
    assert generate(*asked, "--bos")[0] != generate(*asked)[0]


# ---- line by line, and readers that go


class Interrupting(ByteTokenizer):
    """Ctrl-C reaches rank 0 while the second text is written."""

    calls = 0

    def decode(self, ids: Iterable[int]) -> str:
        self.calls += 1
        if self.calls == 50:
            os.kill(os.getpid(), signal.SIGINT)
        return super().decode(ids)


def job(**changes: Any) -> Job:
    settings = {"new_tokens": 20, "begin": None, "use_cache": True, "stream": False, "json": False, "batch_size": 2}
    return Job(limits=TextLimits(new_tokens=20, seq_length=64), sampling=Sampling(), **(settings | changes))


def on_two(run: Path, work: Any) -> None:
    opened = open_checkpoint(ModelFlags(checkpoint=run, layout="dp2", device="cpu"))
    assert on_ranks(dataclasses.replace(opened, tokenizer=Interrupting()), "a test", work) == 0


def test_lines_of_stdin_and_ctrl_c(run: Path, texts: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    def work(model: LoadedModel) -> None:
        sys.stdin = io.StringIO(f"naïve — \n\nclass A(\n{'x' * 64}\nclass A(\n")
        converse(job(), model)

    on_two(run, work)
    out, err = capfd.readouterr()
    lines = out.split(texts[2] + "\n", 1)[1]
    interrupted, rest = lines[: -len(texts[3]) - 1], lines[-len(texts[3]) - 1 :]
    assert rest == f"{texts[3]}\n"
    assert interrupted.endswith("\n") and 0 < len(interrupted) < 20 and texts[3].startswith(interrupted[:-1])
    assert "xxx': 64 tokens; expected fewer than model.seq_length, 64" in err
    assert "Ctrl-D the program" in err


def test_nothing_more_is_computed_once_nothing_reads(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(model: LoadedModel) -> None:
        if model.ranks.rank == 0:
            reader, writer = os.pipe()
            os.close(reader)
            model = dataclasses.replace(model, stdout=writer)
        answer([Prompt(text="a", place="", record={})] * 20, job(), model)

    on_two(run, work)
    err = capfd.readouterr().err
    assert "4 of 20 prompts" in err and "8 of 20 prompts" not in err


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "expected one of --prompt, --file, --interactive; found none."),
        (["--prompt", "a", "--interactive"], "found --prompt and --interactive."),
        (["--prompt", "a", "--max_new_tokens", "0"], "--max_new_tokens must be 1 or more, found 0."),
        (["--prompt", "a", "--top_p", "0"], "--top_p must be above 0"),
        (["--prompt", "a", "--stop", ""], "--stop: an empty text"),
        (["--prompt", "a", "--bos"], "names no begin-of-text id"),
        (["--file", "a", "--stream"], "--stream is for --prompt"),
        (["--file", "nowhere.txt"], "--file nowhere.txt: cannot be read: No such file or directory."),
        (["--prompt", "a", "--layout", "tpp2"], 'layout "tpp2": cannot read "t"'),
        (["--prompt", "a", "--layout", "pp3"], "model.num_layers 4 is not a multiple of PP 3"),
        (["--prompt", "abc", "--max_new_tokens", "62"], "--prompt: 3 tokens and --max_new_tokens 62 are more than"),
        (["--prompt", "a\udcff"], "--prompt: expected text, found half a surrogate pair, or a byte that is no UTF-8"),
        (["--prompt", "x" * 64], "--prompt: 64 tokens; expected fewer than model.seq_length, 64"),
    ],
)
def test_flags_that_cannot_be(run: Path, flags: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        main([str(run), *flags])
    assert words in str(raised.value)


def test_files_of_prompts_that_cannot_be(run: Path, tmp_path: Path) -> None:
    for name, content, words in (
        ("empty.txt", "\n \n", "holds no prompt"),
        ("a.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', 'a.jsonl, line 2: expected an object with a text "prompt"'),
        ("b.jsonl", "plain\n", "b.jsonl, line 1: expected an object"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=words):
            main([str(run), "--file", str(tmp_path / name)])


def test_a_checkpoint_without_a_tokenizer_and_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", TINY["llama2_tiny"])
    import_folder(tmp_path / "hf", tmp_path / "checkpoint", dtype=None, workers=1, max_file_bytes=1 << 30)
    with pytest.raises(UserError, match=r"had no tokenizer that Triplane reads. Without a tokenizer there is no text"):
        main([str(tmp_path / "checkpoint"), "--prompt", "a"])
    with pytest.raises(UserError, match=r"a Hugging Face folder\. Convert it, and give the result: python -m"):
        main([str(tmp_path / "hf"), "--prompt", "a"])


def test_damage_is_exit_code_2(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run / "checkpoints" / LAST, tmp_path / LAST))
    data = max(folder.glob("*.bin"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    out, err = generate(folder, "--prompt", "a", code=2)
    assert out == "" and f"tools.generate: checkpoint {folder} is damaged: " in err and "Traceback" not in err
