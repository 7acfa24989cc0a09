"""What both scripts train, in plain PyTorch: the numbers that every launcher's ranks must come to."""

import torch

STEPS = 3


def net() -> torch.nn.Sequential:
    """The same weights everywhere."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batch(step: int) -> torch.Tensor:
    """The rows of a step, of which replicas take their share."""
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """The mean over rows, so that the mean over replicas is that of the whole batch."""
    return (outputs - 1).square().mean()


def expected() -> list[float]:
    """The losses of one process without any launcher."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
