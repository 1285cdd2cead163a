"""How fast Triplane is on a CPU: a training step against plain PyTorch, ranks to their first step, answers without torch."""
