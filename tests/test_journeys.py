"""The journeys of README.md and docs/journeys.md, as they are printed: each command, one after the other, in a folder.

Texts are real: descriptions of the installed packages and Python's own help. Commands that need GPUs train a tiny model
for a few steps on CPU ranks instead, by flags behind those printed; what needs SLURM or the network is left out.
"""

import importlib.metadata
import json
import shlex
import subprocess
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from safetensors.torch import load_file

from checkpoint_parts import Parts, on_ranks
from parallel.launch import Identity
from programs import Program
from ranks import run_ranks
from runs import ROOT
from tests.test_docs import BLOCK
from tests.tools.reshard_sources import save
from tools.from_megatron.convert import convert as translated
from tools.preprocess.__main__ import main as preprocess
from training.config import recipe

SMALL = (
    "--device cpu --nproc 2 --data.cache_dir cache --model.seq_length 64 --train.global_batch_size 8 "
    "--train.micro_batch_size 2 --train.train_iters 4 --train.eval_interval 2 --train.eval_iters 1 --log.log_interval 1"
)
"""Behind a training that is printed for GPUs."""
SCRIPT = """
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --ffn-hidden-size 176 \
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm \
    --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 \
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 \
    --global-batch-size 32 --train-iters 4 --lr 3e-4 --data-path shards/web --tokenizer-type SentencePieceTokenizer \
    --tokenizer-model llama.model --save checkpoints/llama3_8b --save-interval 500
"""
"""Of a small model, with the paths of docs/from_megatron.md's."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that is a checkout, with texts in mytext/."""
    for name in ("pretrain_gpt.py", "program", "parallel", "models", "data", "training", "tools", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mytext").mkdir()
    for name, text in topics.items():
        (tmp_path / f"mytext/{name}.txt").write_text(text)
    for package in importlib.metadata.distributions():
        about = package.read_text("METADATA") or ""
        (tmp_path / f"mytext/{package.name}.md").write_text(about.partition("\n\n")[2] or about)
    return tmp_path


def commands(page: str, heading: str) -> list[tuple[str, str]]:
    """Of a section: the mark above each command's block, and the command."""
    (section,) = [part for part in (ROOT / page).read_text().split("\n## ") if part.startswith(f"{heading}\n")]
    return [
        (mark, line)
        for mark, block in BLOCK.findall(section)
        for line in block.replace("\\\n", "").splitlines()
        if line and not line.startswith("#")
    ]


def follow(checkout: Path, page: str, heading: str, *flags: str) -> list[str]:
    """Type a section's commands, training with SMALL and flags behind; what was typed."""
    typed = []
    for mark, line in commands(page, heading):
        trains = line.startswith("python pretrain_gpt.py") and "--dry_run" not in line
        if mark in ("needs: SLURM", "needs: the network") or (mark == "needs: a GPU" and not trains):
            continue
        typed.append(line)
        if not line.startswith("python "):
            subprocess.run(line, shell=True, cwd=checkout, check=True)
            continue
        words = shlex.split(f"{line} {SMALL} {shlex.join(flags)}" if trains else line, comments=True)
        words, target = (words[:-2], words[-1]) if ">" in words else (words, None)
        module = words[2] if words[1] == "-m" else ""
        assert words[0] == "python" and (module or words[1] == "pretrain_gpt.py"), line
        output = checkout / f"output_{len(typed)}"
        program = Program(words[3 if module else 2 :], output, module=module, folder=checkout)
        out, err = program.communicate()
        assert program.returncode == 0, f"{line}\n{out}\n{err}"
        if target:
            (checkout / target).write_text(out)
    return typed


def write_model(folder: Path, texts: Path) -> None:
    """What save_pretrained leaves of a small Llama, and of a tokenizer of these texts."""

    def write(_: Identity) -> None:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        ids = {"vocab_size": 2048, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 0}
        LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_key_value_heads=2)).to(torch.bfloat16).save_pretrained(folder)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=["<|end|>"], show_progress=False)
        tokenizer.train(sorted(map(str, texts.glob("*.txt"))), trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)

    run_ranks(1, write)


def save_megatron(checkout: Path) -> None:
    """What the script's job has left at iteration 1000 of those files and folders that the journey begins with."""
    (checkout / "train_llama3_8b.sh").write_text(SCRIPT)
    model = str(checkout / "llama.model")
    assert preprocess(["train", str(checkout / "mytext"), "--output", model, "--vocab_size", "4000"]) == 0
    shards = str(checkout / "shards/web")
    assert preprocess([str(checkout / "mytext"), "--output", shards, "--tokenizer", model, "--workers", "1"]) == 0
    values = translated(SCRIPT.replace("llama.model", model), "a script.", {})[0]
    (checkout / "theirs.toml").write_text(values)
    saved = checkout / "checkpoints/llama3_8b/iter_0001000"

    def train_and_save(parts: Parts) -> None:
        parts.train(2)
        save(parts, saved, "fully_reshardable", consumed=2 * 32)

    on_ranks(2, recipe.load(checkout / "theirs.toml"), train_and_save)


def test_one_node_your_text(checkout: Path) -> None:
    """tools.doctor, tools.preprocess, tools.plan, dry run, training, tools.report, tools.convert."""
    typed = follow(checkout, "README.md", "One node, your text", "--model.shape", "llama3_tiny")
    assert len(typed) >= 8
    run = recipe.load(checkout / "runs/mine/config.toml")
    assert (run.data.paths, run.data.tokenizer, run.model.vocab_size) == (("shards/mine",), "tokenizer.model", None)
    assert (checkout / "runs/mine/report.html").is_file()
    exported = json.loads((checkout / "hf_out/config.json").read_text())
    assert (exported["vocab_size"], exported["model_type"]) == (32000, "llama")


@pytest.mark.campaign
def test_from_scratch(checkout: Path) -> None:
    """tools.preprocess, its verify too, tools.plan, training with samples, tools.generate, tools.convert."""
    follow(checkout, "docs/journeys.md", "From scratch, on your own text", "--model.shape", "qwen3_tiny")
    assert json.loads((checkout / "hf_out/config.json").read_text())["vocab_size"] == 16000
    assert (checkout / "runs/qwen/samples.jsonl").is_file() and (checkout / "plan.html").is_file()


@pytest.mark.campaign
def test_continue_a_hugging_face_model(checkout: Path) -> None:
    """What tools.convert imports is what training starts from: a few small steps later its weights are still near."""
    write_model(checkout / "Llama-3.2-1B", checkout / "mytext")
    follow(checkout, "docs/journeys.md", "Continue a Hugging Face model")
    run = recipe.load(checkout / "runs/tuned/config.toml")
    assert (run.checkpoint.load, run.data.tokenizer) == ("imported", "imported/tokenizer.json")
    there, back = (load_file(checkout / f"{name}/model.safetensors") for name in ("Llama-3.2-1B", "hf_tuned"))
    moved = {name: float((back[name].float() - there[name].float()).abs().max()) for name in there}
    assert back.keys() == there.keys() and 0 < max(moved.values()) < 1e-3, moved


@pytest.mark.campaign
def test_from_a_megatron_script_and_checkpoint(checkout: Path) -> None:
    """tools.from_megatron, tools.reshard, training from iteration 2 on, and back."""
    save_megatron(checkout)
    follow(checkout, "docs/journeys.md", "From a Megatron-LM script and checkpoint")
    lines = [json.loads(line) for line in (checkout / "runs/llama3_8b/metrics.jsonl").read_text().splitlines()]
    rates = {line["iteration"]: line["learning_rate"] for line in lines if "loss" in line}
    total = 4 * 32  # of the script, over which Megatron-LM's rate falls to 0; SMALL goes on with batches of 8
    assert rates == pytest.approx({3: 3e-4 * (1 - 64 / total), 4: 3e-4 * (1 - 72 / total)})
    assert (checkout / "for_megatron/latest_checkpointed_iteration.txt").read_text().strip() == "4"
