"""How texts are generated: what is asked for, without what computes it."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampling:
    """How it is chosen."""

    temperature: float = 0.0
    """Logits are divided by it. 0: the most probable token, always (greedy)."""
    top_k: int = 0
    """Only the so many most probable tokens. 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 0
    """Text number i is drawn from the generator of ``seed`` + i, alone or beside others, in any layout."""

    def problems(self, prefix: str = "") -> list[str]:
        """What is out of range. prefix: before the fields' names."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"{prefix}temperature must be 0 (greedy) or more, found {self.temperature}.")
        if self.top_k < 0:
            found.append(f"{prefix}top_k must be 0 (all) or more, found {self.top_k}.")
        if not 0 < self.top_p <= 1:
            found.append(f"{prefix}top_p must be above 0 and at most 1, found {self.top_p}.")
        if not 0 <= self.seed < 2**62:
            found.append(f"{prefix}seed must be 0 or more, found {self.seed}.")
        return found


@dataclass(kw_only=True, slots=True, frozen=True)
class TextLimits:
    """When texts end."""

    new_tokens: int
    """At most, of each text."""
    seq_length: int
    """Tokens of a text and its prompt, at most."""
    ends: frozenset[int] = frozenset()
    """Ids that end a text, beside the one that ends a document."""
    stops: tuple[str, ...] = ()
    """Texts that end a text."""
