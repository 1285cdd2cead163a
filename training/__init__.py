"""The configuration, the loop, the step, the optimizer, the checkpoint and the metrics."""
