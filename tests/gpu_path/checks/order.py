"""What a stream reads that does not wait for another."""

import torch

x = torch.zeros(1, device="cuda")
torch.cuda.synchronize()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    x.fill_(100)
unwaited = x + 1
before = unwaited.item()
torch.cuda.current_stream().wait_stream(side)
print(f"unwaited {before}, waited {(x + 1).item()}")
