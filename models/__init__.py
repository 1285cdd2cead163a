"""What is trained: named shapes, FLOP counts, and one pipeline chunk of a model with its initial weights."""
