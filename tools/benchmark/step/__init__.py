"""How fast Triplane is on a CPU: a step against plain PyTorch, ranks' first step, answers without torch."""
