"""What hostile files are put into: folders made once, by the programs themselves, and copied for each case."""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tests.faults.hostile_files import PRECIOUS
from tests.faults.hostile_process import SCRIPT, forked
from training.run_lock import lock
from training.run_lock.lock_heartbeat import file_of
from training.run_lock.record import OWNER, encode, myself, successor
from training.watchdog import verdict_file
from training.watchdog.verdict import Verdict

RECIPE = """# A run whose iterations take milliseconds
nproc = 1
device = "cpu"

[model]
shape = "debug"
num_layers = 2
hidden_size = 32
ffn_hidden_size = 88
seq_length = 16

[precision]
dtype = "fp32"

[data]
paths = ["corpus.txt"]
tokenizer = "byte"
cache_dir = "cache"
split = "969,30,1"

[optimizer]
lr = 3e-3
weight_decay = 0.1
lr_warmup_iters = 1

[train]
train_iters = 4
global_batch_size = 4
micro_batch_size = 1
seed = 1234

[checkpoint]
save_interval = 1
keep = 10
async_save = false

[log]
log_interval = 1
tensorboard = false
"""
RUN = (SCRIPT, "recipe.toml", "--run_dir", "run")
SCENE_LIMIT_S = 120
MEGATRON = """#!/bin/bash
#SBATCH --nodes=4
GPUS_PER_NODE=8
CHECKPOINTS=${1:-/checkpoints}
MODEL=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048)
TRAIN="--micro-batch-size 2 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --min-lr 1e-5 --bf16"
if [[ $GPUS_PER_NODE -gt 4 ]]; then
    TRAIN+=" --eval-interval 100"
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 4 pretrain_gpt.py "${MODEL[@]}" $TRAIN \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model /data/t.model \\
    --save "$CHECKPOINTS" --data-path /data/my_text_document --tensor-model-parallel-size 2
"""


def corpus(documents: int) -> list[str]:
    """Texts of a few hundred characters, none like another."""
    words = "the run saves a checkpoint and goes on from it; Grüße 你好 tensor gradient loss token offset".split()
    return [" ".join(words[(n * 7 + m * m) % len(words)] + str(n % 10) for m in range(40)) for n in range(documents)]


def done(*words: str, folder: Path) -> None:
    """Run a command of the scene's making. Raises RuntimeError where it fails."""
    ended = forked(words, folder, SCENE_LIMIT_S)
    if ended.code:
        raise RuntimeError(f"{' '.join(words)} ended with {ended.code}: {ended.said}")


def make_run(folder: Path) -> None:
    """A run of 4 iterations that has ended after 3, each with its checkpoint, and all that may lie beside."""
    (folder / "corpus.txt").write_text("\n".join(corpus(60)))
    (folder / "recipe.toml").write_text(RECIPE)
    done(*RUN, "--train.exit_interval", "3", folder=folder)
    done("tools.supervise.decide", "--run_dir", "run", "--exit_code", "1", "--max_attempts", "9", folder=folder)
    run = folder / "run"
    (run / "skipped_samples.json").write_text(json.dumps({"what": "skipped", "ranges": [[1000, 1004]]}, indent=2))
    (run / "done").write_text("3\n")
    (run / "requeue").write_text("3\n")
    start = run / "watch/start-0123456789abcdef"
    start.mkdir(parents=True)
    line = "rank 0 of 1 on n1 hangs in iteration 3, phase step"
    verdict_file.leave(
        start, Verdict(kind="hang", rank=0, world_size=1, host="n1", iteration=3, phase="step", line=line)
    )


def make_text(folder: Path) -> None:
    """Documents in every form, tokenizers of two kinds, and shards."""
    import zstandard

    texts = corpus(80)
    lines = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()
    (folder / "docs.jsonl").write_bytes(lines)
    (folder / "small.jsonl").write_bytes(b"\n".join(lines.split(b"\n")[:14]))  # shards whose ends are all of them
    (folder / "docs.txt").write_text("\n".join(texts))
    with gzip.GzipFile(folder / "docs.jsonl.gz", "wb", mtime=0) as file:
        file.write(lines)
    (folder / "docs.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    (folder / "recipe.toml").write_text(RECIPE.replace('paths = ["corpus.txt"]\n', ""))
    make_tokenizer(texts, folder / "tokenizer")
    model = ("train", "docs.jsonl", "--output", "t.model", "--vocab_size", "400")
    done("tools.preprocess", *model, folder=folder)
    for name, source in (("a", "small.jsonl"), ("b", "docs.txt")):
        shards = (source, "--output", f"shards/{name}", "--tokenizer", "byte", "--workers", "1")
        done("tools.preprocess", *shards, folder=folder)
    prefixes = sorted(str(path.relative_to(folder)).removesuffix(".bin") for path in folder.glob("shards/*.bin"))
    (folder / "blend.toml").write_text("".join(f'"{prefix}" = {n + 1}.5\n' for n, prefix in enumerate(prefixes)))
    (folder / "blend.txt").write_text(" ".join(f"{n + 1} {prefix}" for n, prefix in enumerate(prefixes)))


def make_tokenizer(texts: list[str], folder: Path) -> None:
    """A byte-level BPE tokenizer.json of 400 ids, and what lies beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_model(folder: Path) -> None:
    """A Hugging Face folder in two files, as our own export writes it."""
    make_run(folder)
    done("tools.convert", "export", "run/checkpoints/iter_0000003", "hf", "--max_shard_size", "100KB", folder=folder)
    shutil.rmtree(folder / "run")
    shutil.rmtree(folder / "cache")


def make_files(folder: Path) -> None:
    """What the tools read that have no run's folder."""
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "corpus.txt").write_text("\n".join(corpus(60)))
    (folder / "pretrain.sh").write_text(MEGATRON)
    root = Path(__file__).resolve().parents[2]
    shutil.copyfile(root / "slurm/clusters/h100_ib.toml", folder / "cluster.toml")
    shutil.copyfile(root / "docs/faults.md", folder / "faults.md")


MAKERS: Mapping[str, Callable[[Path], None]] = {
    "run": make_run, "text": make_text, "model": make_model, "files": make_files,
}  # fmt: skip


def make(name: str, root: Path) -> Path:
    """A scene, once."""
    folder = root / name
    if not folder.exists():
        unfinished = root / f"{name}.unfinished"
        unfinished.mkdir(parents=True)
        (unfinished / PRECIOUS).write_text("nothing of a run's\n" * 100)
        MAKERS[name](unfinished)
        unfinished.rename(folder)
    return folder


def with_dead_owner(folder: Path) -> None:
    """The run was killed: its owner's record lies there, that of one who took over from it, and its heartbeat."""
    run = folder / "run"
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    first = replace(myself(run, {}), pid=pid, process_start=1)
    second = replace(first, attempt="0123456789abcdef")
    (run / OWNER).write_bytes(encode(first))
    successor(run, first.attempt).write_bytes(encode(second))
    file_of(run, second.attempt).write_text("1 1\n")


def waits_briefly() -> None:
    """In the process of a command: an owner of whom nothing is known is dead after 2 s without a beat, not 60."""
    lock.acquire.__defaults__ = (2.0, *(lock.acquire.__defaults__ or ())[1:])
