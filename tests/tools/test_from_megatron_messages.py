"""What tools.from_megatron says is true of today's program: no promise, no flag and no field that is not there."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.megatron_scripts import SMALLEST
from tools.from_megatron.__main__ import FromMegatron, main
from tools.from_megatron.flags import known
from training.config.recipe import names, sections

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "tools/from_megatron").rglob("*.py"))
OF_LAUNCHERS = ("programs.py", "ranks.py", "functional_test.py")
"""Files that hold flags of srun, sbatch and torchrun."""
PROMISES = re.compile(
    r"\b(not|isn't) (\w+ )?yet\b|\bso far\b|\bfor now\b|\bcurrently\b|\bsoon\b|\bin the future\b|\bTODO\b", re.I
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a file with its line; of an f-string its constant parts, joined by {}. Docstrings are not said."""
    tree = ast.parse(path.read_text())
    silent = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.add(node.value)
        if isinstance(node, ast.JoinedStr):
            silent |= {part for part in node.values if isinstance(part, ast.Constant)}
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            yield node.lineno, node.value


def test_nothing_is_promised() -> None:
    found = [f"{path.name}:{line}: {text}" for path in SOURCES for line, text in texts(path) if PROMISES.search(text)]
    found += [line for line in (FromMegatron.__doc__ or "", main.__doc__ or "") if PROMISES.search(line)]
    assert not found


def test_flags_that_messages_name_exist() -> None:
    own = {field.name for field in dataclasses.fields(FromMegatron)} | set(names())
    everything = own | set(known())
    wrong = []
    for path in (path for path in SOURCES if path.name not in OF_LAUNCHERS):
        for line, text in texts(path):
            if " " not in text.strip():
                continue
            named = re.finditer(r"(?<![\w{'-])--([a-z][\w.-]*)(\{?)", text)
            ends = [found[1].rstrip(".-") for found in named if not found[2]]
            wrong += [f"{path.name}:{line}: --{name}" for name in ends if name not in everything]
    assert not wrong


def test_fields_that_messages_name_exist() -> None:
    fields, wrong = set(names()), []
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(sections())})\.[a-z]\w+")
    for path in (path for path in SOURCES if not path.name.startswith(("bridge", "foreign"))):
        for line, text in texts(path):
            wrong += [f"{path.name}:{line}: {name}" for name in pattern.findall(text) if name not in fields]
    assert not wrong


def test_the_walk_sees_what_is_wrong() -> None:
    assert PROMISES.search("x is not read yet") and PROMISES.search("not yet") and not PROMISES.search("another yeti")
    assert len(SOURCES) > 25
    assert sum(len(list(texts(path))) for path in SOURCES) > 1000


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer ademamix",
        "--ademamix-alpha 8 --ademamix-beta3 0.999",
        "--position-embedding-type alibi",
        "--use-alibi-position-embeddings",
        "--hybrid-layer-pattern M-D",
        "--goldfish-loss",
        "--hybrid-layer-pattern M-/M-",
        "--normalization DyT",
        "--moe-router-load-balancing-type sinkhorn --num-experts 4",
        "--sft",
        "--use-checkpoint-args",
    ],
)
def test_what_cannot_be_the_same_model_is_refused_unless_asked_for(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"pretrain_gpt.py {SMALLEST} {flags}"
    assert main([command]) == 2
    refused = capsys.readouterr()
    assert not refused.out and flags.split()[0] in refused.err and "--allow_partial" in refused.err
    assert main([command, "--allow_partial"]) == 1
    partial = capsys.readouterr()
    assert "# Another model or another training without these" in partial.out
    assert flags.split()[0] in partial.out and "[model]" in partial.out


@pytest.mark.parametrize(
    "program",
    "pretrain_t5.py a/pretrain_bert.py multimodal/train.py pretrain_mamba.py pretrain_vision_dino.py".split(),
)
def test_a_program_that_trains_something_else_is_refused(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"torchrun {program} {SMALLEST}"]) == 2
    assert f"{program}: it trains" in capsys.readouterr().err


def test_no_mark_of_our_own_is_in_what_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"D=$(date +%s)\nx.py {SMALLEST} --save /r/$D-$USER --load $L --no-such $D '$D' $MORE --optimizer-cpu-offload"
        ' --data-path 0.5 $A/b 0.5 $(ls c) --tensorboard-dir "$T" --wandb-project p --wandb-exp-name $D --spec $D x'
        " --data-cache-path ~/c --num-workers $N stray$D \U000f0001\ue000aa\ue001\n"
    )
    assert main([str(script), "--allow_partial"]) == 1
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "run_dir: --save /r/$(date +%s)-$USER" in text and "--no-such $(date +%s) $D" in text
    assert text.replace("\n", "").isprintable() and "_42070" not in text
    assert not re.search(r"[0-9a-f]{16}", text)
