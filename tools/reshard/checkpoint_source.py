"""A checkpoint to read, of Triplane or Megatron: its tensors under Triplane's keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.tokenizers import base
from tools.reshard.tensors import SourceRows, Tensors
from training.checkpoint.state import JSON, State
from training.config.run_config import RunConfig

STATE = "optimizer.state."
MASTER = STATE + "param."
STATES = ("param", "exp_avg", "exp_avg_sq")
UNCHANGED = ("rng.", "fp8.")


@dataclass(kw_only=True)
class CheckpointSource:
    """What a checkpoint holds. Close its files."""

    folder: Path
    files: Tensors
    origins: Mapping[str, SourceRows]
    """Every tensor by our key."""
    state: State
    config: RunConfig
    about: Mapping[str, JSON] = field(default_factory=dict)
    """What its manifest says."""
    carried: Mapping[str, Path] = field(default_factory=dict)
    """Carried files by name: a tokenizer's, say."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """What is written beside them, by name."""
    tokenizer: str | None = None
    """Of these, what data.tokenizer names; None: what the configuration says."""
    pads_as_configured: bool = True
    """Whether the vocabulary has the rows that the configuration says. Megatron's depend on TP."""
    notes: tuple[str, ...] = ()
    """What to say of it: of what is there and is not read."""
    fingerprint: Any = None
    """What tells one state of the folder from another without reading tensors."""

    @property
    def real_vocab_size(self) -> int:
        """Token ids. Raises UserError where the tokenizer that tells them is not there."""
        return real_vocab_size(self.config, self.folder)

    def weights(self) -> dict[str, SourceRows]:
        """Weights and buffers; those that are there as the optimizer's fp32 ones only, as these."""
        masters = {key.removeprefix(MASTER): origin for key, origin in self.origins.items() if key.startswith(MASTER)}
        plain = {key: origin for key, origin in self.origins.items() if not key.startswith((STATE, *UNCHANGED))}
        return masters | plain

    def states(self, key: str, of: Sequence[str] = STATES) -> dict[str, SourceRows]:
        """The optimizer's tensors of a weight by their keys; empty where there are none."""
        names = (f"{STATE}{part}.{key}" for part in of)
        return {name: self.origins[name] for name in names if name in self.origins}


def real_vocab_size(config: RunConfig, folder: Path) -> int:
    """Ids that mean something: of the configuration, or else of the tokenizer."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    return base.load(config.data, folder, lambda _: None).vocab_size
