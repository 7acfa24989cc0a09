"""What a checkpointed function finds when it runs again in backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.offloading.offloading import Offloading
from opensmd.modelparallel.runtime.calls.checkpointed import checkpointed


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_argument_that_is_given_twice_is_one_again(tmp_path: Path, offloaded: bool) -> None:
    offloading = Offloading(2, str(tmp_path)) if offloaded else None
    attention = nn.MultiheadAttention(4, 2)
    start = torch.randn(3, 2, 4, requires_grad=True)
    found = []

    def attend(query: Tensor, options: dict[str, Tensor]) -> Tensor:
        found.append(options["key"] is query and options["value"] is query)
        output: Tensor = attention(query, options["key"], options["value"])[0]
        return output

    def gradient() -> Tensor:
        x = start * 1
        options = {"key": x, "value": x}
        output = checkpointed(attend, (x,), {"options": options}, offloading=offloading)
        (of_start,) = torch.autograd.grad(output.square().sum(), start)
        return of_start

    of_start = gradient()
    x = start * 1
    plain = attention(x, x, x)[0].square().sum()
    torch.testing.assert_close(of_start, torch.autograd.grad(plain, start)[0])
    assert found == [True, True]
    assert offloading is None or offloading.count == 1
