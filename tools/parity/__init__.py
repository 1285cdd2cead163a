"""Proof that a layout trains the same model as one rank does, and that a model computes what a reference does."""
