"""One architecture's names of tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from models.hf.row_layouts import Rule


@dataclass(slots=True, frozen=True)
class Table:
    """An architecture's names."""

    whole: Mapping[str, Rule]
    """What is there once."""
    block: Mapping[str, Rule]
    """What a block has, without its prefix on either side."""
    prefix: str = "model.layers."
    """Of a block, before its number; those of multi-token prediction follow the model's own."""
    bare: str = ""
    """A prefix that files on the hub may leave out."""
    computed: re.Pattern[str] = re.compile(r"\.rotary_emb\.inv_freq$")
    """Tensors in old files that are no weights: they follow from the configuration."""
    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """What a block of multi-token prediction holds again: their name, and which of our parameters it is."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers that each block's files hold although every model has the same; ``computed`` knows them, too."""
    nested: str = ""
    """What names may have behind ``model.`` in files that were taken out of a model of text and images."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors [E, rows, in] that a block's files may hold in place of each expert's: their name -> the expert's
    matrices, whose rows lie one below the other."""
