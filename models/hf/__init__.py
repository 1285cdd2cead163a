"""Hugging Face's names of weights and configurations, and ours. Each model_type's are in its family's file.

    shapes.py         config.json <-> GPTShape
    config_parts.py   what is not one number for one number; deepseek.py, rope.py: more of it
    other_keys.py     keys that no table has: without effect, or refused
    keys.py           what a key may hold, and the bounds of its number
    tables.py         each of our parameters -> the names of theirs that it is made of, and how
    row_layouts.py    a table of names, and which rows of Hugging Face's tensors are which of our rows

What the tables do not know is refused by name, never dropped: a rope type, a bias, a window, a tensor. A key that
neither transformers' class nor we read, and that could only show in tensors, is named and carried.
"""
