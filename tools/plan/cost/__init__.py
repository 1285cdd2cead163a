"""Seconds of a step, from physics: matrix products, attention, memory traffic, links, the pipeline, the optimizer."""
