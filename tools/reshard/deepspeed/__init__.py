"""DeepSpeed's folders of ZeRO-1, 2 and 3, read: fp32 weights and Adam's moments, from the files of all ranks.

partitions.py   where each parameter lies in the ranks' flat memory
source.py       the folder's files, and the checkpoint under our keys
"""
