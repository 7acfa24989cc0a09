"""What deferred backwards find in attributes, although their functions have gone on."""

from __future__ import annotations

from typing import Any

from opensmd.modelparallel.runtime.backward.attributes_then import AttributesThen
from opensmd.modelparallel.runtime.side_effects.slots import Slot
from tests.unit.modelparallel.keeping import Keeping


def test_a_backward_finds_what_was_there_and_leaves_what_its_hooks_set() -> None:
    module: Any = Keeping()
    module.count, module.loss = 1, 10
    then = AttributesThen()
    then.keep(0, [Slot(module, "count"), Slot(module, "loss")])
    module.count, module.loss = 2, 20
    then.show(0)
    assert (module.count, module.loss) == (1, 10)
    module.loss = 30
    assert then.hide(0)
    assert (module.count, module.loss) == (2, 30)
    then.forget(0)
    then.show(0)
    assert not then.hide(0)
    assert module.count == 2
