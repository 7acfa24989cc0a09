"""LSTM, GRU and hand-written recurrence, with their states crossing stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.ranks.models.case import CLASSES, WIDTH, Case, sequences

__all__ = ["CASES"]


class Lstm(nn.Module):
    """Two LSTMs, the second starting from the first one's last state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, (state, cell) = self.first(x)
        h, (last, _) = self.second(h, (state.repeat(2, 1, 1), cell.repeat(2, 1, 1)))
        out: Tensor = self.head(h[:, -1] + last[0])
        return out


class Gru(nn.Module):
    """A bidirectional GRU, and packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(WIDTH, 6, batch_first=True, bidirectional=True)
        self.second = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.first(x)
        h, _ = self.second(h.contiguous())
        out: Tensor = self.head(h.mean(1))
        return out


class Packed(nn.Module):
    """Packing and unpacking inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0]) % 5 + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        h, _ = self.rnn(packed)
        out: Tensor = pad_packed_sequence(h, batch_first=True, total_length=5)[0]
        return out


def packed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Packed(), nn.Flatten(), nn.Linear(5 * WIDTH, CLASSES))


class PackedBetween(nn.Module):
    """Packing and unpacking between stages: how long the packed data is depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=4)
        packed = pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        h, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(h, batch_first=True)
        out: Tensor = self.head(padded.sum(1))
        return out


class Cells(nn.Module):
    """Two cells called in turn for each time step: every step crosses stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRUCell(WIDTH, WIDTH)
        self.second = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], WIDTH)
        state = (torch.zeros_like(h), torch.zeros_like(h))
        for step in x.unbind(1):
            h = self.first(step, h)
            state = self.second(h, state)
        out: Tensor = self.head(state[0] + state[1])
        return out


CASES = (
    Case("lstm", Lstm, ("first", "second", "head"), batch=sequences),
    Case("gru", Gru, ("first", "second", "head"), batch=sequences),
    Case("packed sequences", packed, ("0", "1", "2", "3"), batch=sequences, whole=False),
    Case("cells", Cells, ("first", "second", "head"), batch=sequences),
    Case("packing between stages", PackedBetween, ("first", "rnn", "head"), batch=sequences),
)
