"""Transformers' logits and ours for the same tokens, each from a process of its own.

Of their own, because our CPU backend redirects parts of torch, and because neither model has to fit beside the other.
This is the one part of the tool that builds models and needs torch; it starts

    python -m tools.convert.logits hf_folder|checkpoint FOLDER OUTPUT.npy DTYPE
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from models.families import resolve
from parallel.errors import UserError
from tools.convert.exporting import read_config, vocabulary

if TYPE_CHECKING:
    from torch import nn

TOKENS = 64
TOLERANCE = 1e-4
"""Of the largest logit: fp32 sums in another order, over up to some hundred blocks."""


def compare(hf_folder: Path, checkpoint: Path, dtype: str) -> str:
    """A sentence with the largest difference. dtype: what both models' weights are rounded to; they compute in fp32.

    Raises UserError where a model cannot run, or the logits differ.
    """
    with tempfile.TemporaryDirectory(prefix="triplane-logits-") as scratch:
        outputs = {"hf_folder": Path(scratch, "theirs.npy"), "checkpoint": Path(scratch, "ours.npy")}
        for side, folder in (("hf_folder", hf_folder), ("checkpoint", checkpoint)):
            command = [sys.executable, "-m", "tools.convert.logits", side, str(folder), str(outputs[side]), dtype]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = "\n".join(done.stderr.strip().splitlines()[-3:])
                raise UserError(f"{folder}: its logits could not be computed (exit code {done.returncode}): {last}")
        theirs, ours = (np.load(output) for output in outputs.values())
    difference, largest = float(np.abs(theirs - ours).max()), float(np.abs(theirs).max())
    if not difference <= TOLERANCE * largest:
        raise UserError(f"logits differ by up to {difference:.2e}, of {largest:.2e}: {hf_folder} and {checkpoint}.")
    return f"logits of {theirs.shape[0]} tokens agree within {difference:.1e}; the largest is {largest:.1f}."


def theirs_to_file(folder: Path, output: Path, dtype: str) -> None:
    """Transformers' logits, [TOKENS, vocab_size] in fp32. Nothing is downloaded, no code of the folder is run."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
    ).eval()
    _round(model, dtype)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens(model.config.vocab_size))[None]).logits[0]
    np.save(output, logits.numpy())


def ours_to_file(folder: Path, output: Path, dtype: str) -> None:
    """Our logits, without the padding of the vocabulary, on one CPU rank."""
    import dataclasses

    import torch

    from models import gpt
    from parallel import groups
    from parallel.config import ParallelConfig, PrecisionConfig
    from parallel.launch import Identity
    from parallel.layout import layout_of
    from training.checkpoint.model_state import model_boxes
    from training.checkpoint.restoring import read_weights
    from training.checkpoint.storage import Reader

    config, parallel = read_config(folder), ParallelConfig()
    shape = resolve(config.model, vocabulary(config, folder))
    model = dataclasses.replace(config.model, seq_length=TOKENS)
    ids = torch.from_numpy(tokens(shape.vocab_size))[None]
    with groups.start(layout_of(parallel, 1), Identity(), device="cpu", seed=1, timeout_minutes=5) as ranks:
        precision = PrecisionConfig(dtype="fp32")
        chunks = gpt.build(model, shape, parallel, precision, gpt.Recompute(), ranks, seed=1)
        with torch.no_grad(), Reader(folder) as reader:
            read_weights(reader, model_boxes(chunks, ranks))
            chunk = chunks[0].eval()
            _round(chunk, dtype)
            logits = chunk(ids, torch.arange(TOKENS)[None], None)[0, :, : shape.vocab_size]
    np.save(output, logits.float().numpy())


def tokens(vocab_size: int) -> np.ndarray:
    """Any ids, the same in both processes."""
    return np.random.default_rng(1).integers(0, vocab_size, TOKENS)


def _round(model: "nn.Module", dtype: str) -> None:
    import torch

    with torch.no_grad():
        for name, param in model.named_parameters():
            if not name.endswith("e_score_correction_bias"):
                param.copy_(param.to(getattr(torch, dtype)))


if __name__ == "__main__":
    write = {"hf_folder": theirs_to_file, "checkpoint": ours_to_file}[sys.argv[1]]
    write(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
