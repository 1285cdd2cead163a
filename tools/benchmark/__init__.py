"""How fast Triplane is on a CPU, against peers in the same run: a step, checkpoints, data. ``__main__`` lists them."""
