"""No fake tensor of the dry run is left in variables of files and classes, nor used where it is left."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.compatibility.quirks import holds_fakes
from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.exceptions import SMPUnsupportedError

CACHE: dict[int, Tensor] = {}
LAST: Tensor | None = None


class Net(nn.Module):
    """Fills variables of its file, its class and a library's class."""

    cache: ClassVar[dict[int, tuple[Tensor, ...]]] = {0: ()}
    masks: ClassVar[list[Tensor]] = []
    mask: ClassVar[Tensor | None] = None
    calls: ClassVar[int] = 0

    def __init__(self, library: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.library = library

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        Net.calls += 1
        CACHE[4] = Net.mask = LAST = Net.new = torch.arange(4)  # type: ignore[attr-defined]
        Net.cache[4] = (x, Net.mask)
        Net.masks.append(Net.mask)
        if self.library is not None:
            self.library.store(x)
        return self.layer(x)


def test_caches_in_files_and_classes_are_as_before() -> None:
    net = Net()
    capture(net, lambda: net(torch.ones(2, 4)).sum())
    assert CACHE == {} and LAST is None
    assert Net.cache == {0: ()} and Net.masks == [] and Net.mask is None
    assert not hasattr(Net, "new") and Net.calls == 0


def test_a_cache_of_a_library_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("a_library.inner")
    library.__file__ = "/usr/lib/site-packages/a_library/inner.py"
    of_net = ModuleType("a_library")
    kind = type("OfLibrary", (Net,), {"__module__": "a_library"})
    values: dict[str, Tensor] = {}
    vars(library).update(values=values, store=lambda x: values.update(x=x + 1))
    for each in (library, of_net):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    net = kind(library)
    capture(net, lambda: net(torch.ones(2, 4)).sum())
    assert values == {}


def test_a_fake_that_is_left_elsewhere_cannot_be_used() -> None:
    def forward(x: Tensor) -> Tensor:
        forward.__dict__["kept"] = x + 1
        return x

    net = Net()
    capture(net, lambda: net(forward(torch.ones(2, 4))).sum())
    left = forward.__dict__["kept"]
    assert holds_fakes(left)
    with pytest.raises(SMPUnsupportedError, match=r"add.*dry run before the first step, which has no data"):
        torch.ones(2, 4) + left
