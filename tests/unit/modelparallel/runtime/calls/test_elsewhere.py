"""Calls of other ranks: what several that follow each other leave, as if they had been called one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opensmd.modelparallel.runtime.calls.descriptions.description import Description, TensorDescription
from opensmd.modelparallel.runtime.calls.descriptions.known_calls import KnownCalls
from opensmd.modelparallel.runtime.calls.elsewhere import ModuleCall, passed
from opensmd.modelparallel.runtime.calls.keys import call_key
from opensmd.modelparallel.runtime.microbatch import Microbatch
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag, tag_of

CALLS = tuple(
    ModuleCall(home, f"module '{number}'", ("module", str(number), True))
    for number, home in enumerate((1, 2, 2))
)


class Runner:
    """What a microbatch's calls have, with descriptions of ``CALLS`` and a note of what was brought.

    Args:
        argument: of the first call.
        described: of what each returns.

    Attributes:
        of_memory: the tag that a tensor without one gets by its memory.
    """

    def __init__(self, argument: Tensor | None = None, **described: Any) -> None:
        self.of_memory: Tag | None = None
        self.microbatch = Microbatch(0, begun=7)
        self.brought: list[tuple[Tensor, int]] = []
        self.transfers = SimpleNamespace(bring=lambda tensor, tag, home: self.brought.append((tensor, home)))
        self.put = put_tag
        made = TensorDescription(
            shape=(2, 3), stride=(3, 1), dtype=torch.float32, device="cpu", requires_grad=True, **described
        )
        self.context = SimpleNamespace(
            calls=KnownCalls(), trained=SimpleNamespace(epoch=0), others=[], rank=0
        )
        argument = placed(0) if argument is None else argument
        for call in CALLS:
            key = call_key(call.key, (argument,), {}, 0)
            self.context.calls.descriptions[key] = Description("tensor", (made,))
            argument = placed(call.home)

    def leaves_of(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tag | None]]:
        if self.of_memory is not None:
            put_tag(args[0], self.of_memory)
        return [*args], [self.of_memory]


def placed(home: int) -> Tensor:
    tensor = torch.zeros(2, 3)
    put_tag(tensor, Tag(home, requires_grad=True, form=((2, 3), (3, 1), torch.float32)))
    return tensor


def test_calls_that_follow_each_other_leave_one_placeholder_and_the_points_of_all() -> None:
    run, given = Runner(), placed(0)
    made = passed(run, CALLS, given)  # type: ignore[arg-type]
    assert made is not None and made.shape == (2, 3)
    tag, before = tag_of(made), tag_of(given)
    assert tag is not None and (tag.home, tag.requires_grad, tag.serial) == (2, True, 7)
    assert tag.parents == (before,)
    assert run.brought == [(given, 1)]
    # Three calls, and the second's input goes from rank 1 to rank 2.
    assert run.microbatch.next_point() == 4 + 1


def test_what_is_known_with_gradients_is_not_known_without() -> None:
    run, given = Runner(), placed(0)
    with torch.no_grad():
        assert passed(run, CALLS, given) is None  # type: ignore[arg-type]
    assert passed(run, CALLS, given) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", range(3))
def test_calls_are_called_one_by_one_until_each_is_known(missing: int) -> None:
    run = Runner()
    del run.context.calls.descriptions[list(run.context.calls.descriptions)[missing]]
    assert passed(run, CALLS, placed(0)) is None  # type: ignore[arg-type]
    assert not run.brought and run.microbatch.next_point() == 1


def test_what_shares_memory_with_its_argument_is_not_passed() -> None:
    run = Runner(shares=0, is_view=True)
    assert passed(run, CALLS, placed(0)) is None  # type: ignore[arg-type]


def test_from_a_replicated_tensor_no_gradients_go_back() -> None:
    given = torch.zeros(2, 3)
    run = Runner(given)
    made = passed(run, CALLS, given)  # type: ignore[arg-type]
    assert made is not None
    tag = tag_of(made)
    assert tag is not None and (tag.home, tag.requires_grad, tag.parents) == (2, True, ())
    assert run.brought == [(given, 1)] and run.microbatch.next_point() == 4 + 1


def test_a_tensor_whose_memory_has_got_a_home_comes_from_there() -> None:
    run, given = Runner(), torch.zeros(2, 3)
    run.of_memory = tag_of(placed(0))
    made = passed(run, CALLS, given)  # type: ignore[arg-type]
    assert made is not None
    tag = tag_of(made)
    assert tag is not None and tag.parents == (run.of_memory,)


def test_what_is_no_tensor_is_not_passed() -> None:
    assert passed(Runner(), CALLS, (placed(0),)) is None  # type: ignore[arg-type]
