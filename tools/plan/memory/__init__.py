"""Bytes on the fullest rank: weights, gradients and optimizer exactly, activations by formula."""
