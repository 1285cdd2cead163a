"""A start of a run: who starts the ranks, what is ready before they run, what is kept of it."""
