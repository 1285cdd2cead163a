"""Text to token shards, on any number of processes and nodes, so that it may be killed at any point and goes on.

inputs -> units (what they are depends on the inputs and on --unit_mb, never on --workers) -> one shard a unit
-> shuffled (--shuffle_docs) -> joined (--merge).
"""
