"""A Hugging Face folder, to read.

source      its config.json, tensors by rows, what else lies there
headers     which tensors its safetensors files hold, and where
experts     tensors of all experts, seen as those of each
row_blocks  our tensors in blocks, made of rows of theirs
"""
