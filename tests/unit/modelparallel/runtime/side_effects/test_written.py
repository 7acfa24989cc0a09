"""Which arguments a call writes into, above autograd and below."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from opensmd.modelparallel.dry_run.restoring import WrittenTensors
from opensmd.modelparallel.runtime.side_effects.written import written_by_function, written_by_operation


class Written(TorchDispatchMode):
    """Collects what operations write into."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.memory |= {one.data_ptr() for one in written_by_operation(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "method": lambda x, y: x.add_(y),
    "out as a keyword": lambda x, y: torch.add(y, y, out=x),
    "one of two outs": lambda x, y: torch.sort(y, out=(x, torch.empty(0, dtype=torch.long))),
    "assignment": lambda x, y: x.__setitem__(0, 1.0),
    "a list": lambda x, y: torch._foreach_add_([x], [y]),
    "initialisation": lambda x, y: nn.init.constant_(x, 1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_operations_write_into_what_their_schemas_say(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x, y = torch.zeros(3), torch.ones(3)
        with Written() as written:
            OPERATIONS[name](x, y)
        assert x.data_ptr() in written.memory and y.data_ptr() not in written.memory


def test_operations_that_write_nothing_write_into_nothing() -> None:
    with Written() as written:
        torch.zeros(3).add(1).view(3).contiguous()
    assert not written.memory


def named(function: Any, *args: Any, **kwargs: Any) -> list[int]:
    return list(map(id, written_by_function(function, args, kwargs)))


def test_functions_write_into_their_first_argument_their_out_or_their_statistics() -> None:
    x, y, z = torch.zeros(3), torch.ones(3), torch.ones(3)
    assert named(Tensor.mul_, x, y) == [id(x)]
    assert named(Tensor.__iadd__, x, y) == [id(x)]
    assert named(torch.add, x, y, out=z) == [id(z)]
    assert named(torch.max, x, 0, out=(y, z)) == [id(y), id(z)]
    assert named(torch._foreach_mul_, [x, y], 2.0) == [id(x), id(y)]
    assert named(nn.init.normal_, tensor=x) == [id(x)]
    assert named(F.dropout, x, 0.5, inplace=True) == [id(x)]
    assert named(F.batch_norm, x, y, z, training=True) == [id(y), id(z)]
    assert named(F.batch_norm, x, running_mean=y, running_var=z, training=True) == [id(y), id(z)]
    for nothing in (
        named(F.batch_norm, x, y, z),
        named(F.dropout, x, 0.5),
        named(torch.add, x, y),
        named(torch.add, x, y, out=None),
        named(Tensor.__int__, x),
    ):
        assert not nothing


def test_what_the_dry_run_writes_into_parameters_and_inputs_is_put_back() -> None:
    module, x = nn.Linear(2, 2), torch.ones(2)
    before = module.weight.detach().clone()

    def call(x: Tensor) -> None:
        torch.add(module.weight, 1.0, out=module.weight)
        x.mul_(0.5)

    dry_call = functools.partial(call, x)
    written = WrittenTensors(module, dry_call)
    with written, torch.no_grad():
        dry_call()
    assert written.found
    written.put_back()
    assert torch.equal(module.weight, before) and torch.equal(x, torch.ones(2))
