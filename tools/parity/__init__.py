"""Proof that a layout trains the same model as one rank does: loss, gradients, data order, resume."""
