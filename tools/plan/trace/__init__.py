"""trace: exact bytes and collectives of one rank, by running the real program with tensors that have no values."""
