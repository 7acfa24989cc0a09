"""Says how often the kernel gave a rank memory while it took steps that all need the same."""

import resource

import torch


def step() -> None:
    """Three tensors of 24 MiB."""
    for index in [torch.ones(6 << 20) for _ in range(3)]:
        index.add_(1)


def faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(f"faults {faults() - before}", flush=True)
