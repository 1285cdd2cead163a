"""Ranks: who they are, how they are grouped, which layers they hold. Knows nothing of text or GPTs."""
