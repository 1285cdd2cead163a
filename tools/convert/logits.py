"""Transformers' logits and ours for the same tokens, each from a process of its own.

Of their own, because our CPU backend redirects parts of torch, and because neither model has to fit beside the other.
This is the one part of the tool that builds models and needs torch; it starts

    python -m tools.convert.logits hf_folder|checkpoint FOLDER OUTPUT.npy DTYPE
"""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.resolve import resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.launch import Identity
from parallel.layout import layout_of
from parallel.lean_imports import lean
from program.errors import UserError
from program.host_memory import available_bytes
from program.processes import die_with_parent
from tools.convert.cut import cut_of, write_cut
from tools.convert.importing import import_folder
from tools.reshard.checkpoint_source import real_vocab_size
from tools.shared.checked_checkpoint import read_config
from tools.shared.dtypes import round_weights
from tools.shared.hf_folder.source import HfFolder, architecture
from tools.shared.resumable import Rejected

TOKENS = 64
TIMEOUT_S, CUT_TIMEOUT_S = 6 * 3600, 1800
"""For either model's logits; loading it is most of it."""
SPARE_BYTES = 1 << 30
"""Of memory beside a model's weights: the libraries, and what is computed."""
TOLERANCE = 1e-4
"""Of the largest logit: fp32 sums in another order, over up to some hundred blocks."""


def is_possible() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def compare_cut(source: HfFolder, scratch: Path, dtype: str | None) -> str:
    """Of the first block of each kind of a Hugging Face folder, converted into ``scratch``: a sentence, or why not.

    dtype: what the import rounds to. Raises Rejected where the logits differ.
    """
    model_type, shape = architecture(source)
    cut = cut_of(model_type, shape)
    if (needed := 2 * (cut.fp32_bytes * 5 // 4 + SPARE_BYTES)) > (free := available_bytes()):
        memory = f"needs {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
        return f"logits were not compared: {cut} of this model {memory}."
    try:
        write_cut(source, cut, scratch / "hf")
        import_folder(scratch / "hf", scratch / "checkpoint", dtype=dtype, workers=1, max_file_bytes=1 << 40)
        found = _measure(scratch / "hf", scratch / "checkpoint", dtype or "float32", CUT_TIMEOUT_S, at_once=2)
    except UserError as error:  # one model of the two does not run here: no reason not to convert the other's weights
        return f"logits were not compared, of {cut}: {error}"
    if not found.agree:
        what = "transformers computes another model of these numbers than Triplane"
        raise Rejected(
            f"{source.folder}: {cut}: {found.differing}: {what}. Please report its config.json. --no_logits imports it "
            "all the same."
        )
    mtp = "; multi-token prediction was not compared" if shape.mtp_num_layers else ""
    return f"{found.agreeing}, of {cut}{mtp}. --logits compares the whole model."


def compare(hf_folder: Path, checkpoint: Path, dtype: str) -> str:
    """A sentence with the largest difference. dtype: what both models' weights are rounded to; they compute in fp32.

    Raises UserError where a model cannot run, and Rejected where the logits differ.
    """
    found = _measure(hf_folder, checkpoint, dtype, TIMEOUT_S, at_once=1)
    if not found.agree:
        raise Rejected(f"{hf_folder} and {checkpoint}: {found.differing}.")
    return f"{found.agreeing}."


@dataclass(slots=True, frozen=True)
class LogitDifference:
    """What two models' logits for the same tokens are."""

    tokens: int
    difference: float
    largest: float

    @property
    def agree(self) -> bool:
        """False where anything is NaN, too."""
        return self.difference <= TOLERANCE * self.largest

    @property
    def agreeing(self) -> str:
        """In words."""
        return f"logits of {self.tokens} tokens agree within {self.difference:.1e}; the largest is {self.largest:.1f}"

    @property
    def differing(self) -> str:
        """In words."""
        return f"logits differ by up to {self.difference:.2e}, of {self.largest:.2e}"


def _measure(hf_folder: Path, checkpoint: Path, dtype: str, timeout_s: float, at_once: int) -> LogitDifference:
    """at_once: processes, 1 or 2."""
    with tempfile.TemporaryDirectory(prefix="triplane-logits-") as scratch:
        outputs = {"hf_folder": Path(scratch, "theirs.npy"), "checkpoint": Path(scratch, "ours.npy")}
        module = [sys.executable, "-m", "tools.convert.logits"]
        sides = {"hf_folder": (hf_folder, "transformers'"), "checkpoint": (checkpoint, "Triplane's")}
        with ThreadPoolExecutor(at_once) as pool:
            running = [
                pool.submit(_run, [*module, side, str(folder), str(outputs[side]), dtype], whose, timeout_s)
                for side, (folder, whose) in sides.items()
            ]
            for one in running:
                one.result()
        theirs, ours = (np.load(output) for output in outputs.values())
    return LogitDifference(theirs.shape[0], float(np.abs(theirs - ours).max()), float(np.abs(theirs).max()))


def _run(command: list[str], whose: str, timeout_s: float) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{whose} logits took longer than {timeout_s / 60:.0f} minutes.") from None
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise UserError(f"{whose} logits could not be computed (exit code {done.returncode}): {last}")


def theirs_to_file(folder: Path, output: Path, dtype: str) -> None:
    """Transformers' logits, [TOKENS, vocab_size] in fp32. Nothing is downloaded, no code of the folder is run."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
    ).eval()
    round_weights(model, dtype)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens(model.config.vocab_size))[None]).logits[0]
    np.save(output, logits.numpy())


def ours_to_file(folder: Path, output: Path, dtype: str) -> None:
    """Our logits, without the padding of the vocabulary, on one CPU rank."""
    with lean("cpu"):
        import torch

        from models import gpt
        from parallel import groups
        from training.checkpoint.model_state import model_boxes
        from training.checkpoint.restoring import read_weights
        from training.checkpoint.storage import TensorReader

    config, parallel = read_config(folder), ParallelConfig()
    shape = resolve(config.model, real_vocab_size(config, folder))
    model = dataclasses.replace(config.model, seq_length=TOKENS)
    ids = torch.from_numpy(tokens(shape.vocab_size))[None]
    with groups.start(layout_of(parallel, 1), Identity(), device="cpu", seed=1) as ranks:
        precision = PrecisionConfig(dtype="fp32")
        chunks = gpt.build(gpt.Blueprint(model=model, shape=shape, precision=precision), ranks)
        with torch.no_grad(), TensorReader(folder) as reader:
            read_weights(reader, model_boxes(chunks, ranks))
            chunk = chunks[0].eval()
            round_weights(chunk, dtype)
            logits = chunk(ids, torch.arange(TOKENS)[None], None)[0, :, : shape.vocab_size]
    np.save(output, logits.float().numpy())


def tokens(vocab_size: int) -> np.ndarray:
    """Any ids, the same in both processes."""
    return np.random.default_rng(1).integers(0, vocab_size, TOKENS)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    write = {"hf_folder": theirs_to_file, "checkpoint": ours_to_file}[sys.argv[1]]
    write(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
