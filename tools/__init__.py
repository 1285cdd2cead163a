"""Command-line tools: thin mains, run as ``python -m tools.NAME``."""
