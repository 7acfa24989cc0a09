"""Where tensors that hooks carry out of modules are used, and which modules that opens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.observing.escaped_tensors import EscapeSearch, Made
from opensmd.modelparallel.planning.trace import Escape
from opensmd.modelparallel.runtime.tensors.storages import StorageReference


class Run:
    """Plays calls and operations of a model as the dry run sees them."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self._made: dict[int, Made] = {}
        self.search = EscapeSearch(self.stack, lambda tensor: self._made.get(id(tensor)))
        self._kept: list[Tensor] = []

    def make(self, *inputs: Tensor) -> Tensor:
        """An operation where the run is now."""
        out = torch.ones(1)
        self._kept.append(out)
        storage = StorageReference(out.untyped_storage())
        self._made[id(out)] = Made(storage, unit=0, number=len(self._made), level=tuple(self.stack))
        self.search.operation(inputs, out)
        return out

    def call(self, name: str, inside: Callable[[], Tensor], *, hooked: bool = False) -> Tensor:
        """A module, with a hook of its own if ``hooked``."""
        module = nn.Identity()
        for _ in range(2 if hooked else 1):  # the dry run has one everywhere
            module.register_forward_hook(lambda *_: None)
        self.stack.append(name)
        out = inside()
        self.search.returned(module, (), out)
        self.stack.pop()
        return out


@pytest.fixture
def run() -> Run:
    return Run()


def block_that_hides(run: Run, kept: list[Tensor]) -> Tensor:
    """A block returns something computed from its attention's result, which a hook has kept."""

    def block() -> Tensor:
        kept.append(run.call("model.block.attention", run.make, hooked=True))
        return run.make(kept[0])

    return run.call("model.block", block)


def test_what_a_hook_has_seen_and_the_module_returns_has_not_escaped(run: Run) -> None:
    run.search.result(run.call("model", run.make, hooked=True))
    assert run.search.found == set()


def test_a_tensor_used_past_the_module_around_the_hook_opens_that_module(run: Run) -> None:
    kept: list[Tensor] = []

    def model() -> Tensor:
        out = block_that_hides(run, kept)
        return run.make(out, kept[0])

    run.call("model", model)
    assert run.search.found == {Escape(inside=frozenset({"model.block"}), around="model")}


def test_a_tensor_that_the_step_returns_opens_all_around_the_hook(run: Run) -> None:
    kept: list[Tensor] = []
    run.call("model", lambda: block_that_hides(run, kept))
    run.search.result(kept[0])
    assert run.search.found == {Escape(inside=frozenset({"model", "model.block"}), around=None)}


def test_without_hooks_nothing_escapes(run: Run) -> None:
    kept: list[Tensor] = []

    def block() -> Tensor:
        kept.append(run.call("model.block.attention", run.make))
        return run.make(kept[0])

    run.call("model", lambda: run.call("model.block", block))
    run.search.result(kept[0])
    assert run.search.found == set()


def test_what_is_computed_from_what_a_hook_has_seen_escapes_like_it(run: Run) -> None:
    derived: list[Tensor] = []

    def block() -> Tensor:
        seen = run.call("model.block.attention", run.make, hooked=True)
        derived.append(run.make(seen))
        return run.make(seen)

    def model() -> Tensor:
        return run.make(run.call("model.block", block), derived[0])

    run.call("model", model)
    assert run.search.found == {Escape(inside=frozenset({"model.block"}), around="model")}
