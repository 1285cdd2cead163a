"""Each conversion once more in the other direction, compared byte by byte."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from models.hf.shapes import read_shape
from models.hf.tables import copies
from models.resolve import resolve
from program.printing import some
from tools.convert.exporting import ExportedTensor, Weights, target_words, targets
from tools.reshard.checkpoint_source import real_vocab_size
from tools.shared.checked_checkpoint import read_config
from tools.shared.hf_folder.source import HfFolder, names_in
from tools.shared.resumable import Rejected
from training.checkpoint.chosen_weights import ChosenWeights, prefix_of

Side = Literal["checkpoint", "hf_folder"]


def verify(hf_folder: Path, checkpoint: Path, written: Side, chosen: ChosenWeights = "trained") -> str:
    """That every tensor of either side is on the other, with the same bytes: a sentence on what was compared.

    Numbers are compared in the dtype of the side that was written, that is, after rounding; fp8 matrices after their
    scales. Raises Rejected with the tensors that differ.
    """
    config = read_config(checkpoint)
    shape = resolve(config.model, real_vocab_size(config, checkpoint))
    with HfFolder(hf_folder) as source, Weights(checkpoint, prefix_of(chosen, checkpoint)) as weights:
        model_type, _ = read_shape(source.config)
        names = names_in(source, model_type)
        equals = copies(model_type, shape)
        differing, compared, size = [], 0, 0
        for target in targets(model_type, shape, weights, "float32"):
            if target.name not in names and target.name in equals:
                continue  # a copy that their files need not hold
            differing += _difference(target, names, source, weights, written)
            compared, size = compared + 1, size + target.bytes
    if differing:
        raise Rejected(f"{hf_folder} and {checkpoint} differ in {some(differing)}.")
    return f"verified: {compared:,} tensors of {hf_folder} are those of {checkpoint}, bit by bit."


def _difference(
    target: ExportedTensor, names: dict[str, str], source: HfFolder, weights: Weights, written: Side
) -> list[str]:
    if target.name not in names:
        return [f"{target.name} (missing)"]
    name = names[target.name]
    dtype = weights.dtype(target.entry) if written == "checkpoint" else source.dtype(name)
    seen = replace(target, dtype=dtype)
    row = 0
    for ours in target_words(seen, weights):
        if not np.array_equal(ours, source.rows(name, row, len(ours), dtype)):
            return [f"{target.name} (from row {row} on)"]
        row += len(ours)
    return [] if row == target.shape[0] else [f"{target.name} ({row} of {target.shape[0]} rows)"]
