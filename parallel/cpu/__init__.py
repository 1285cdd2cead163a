"""The CPU backend: lets unmodified megatron-core run without CUDA. Installed in rank processes, never on import."""
