"""--trace: exact bytes and collectives of one rank, by running the real program under fake tensors."""
