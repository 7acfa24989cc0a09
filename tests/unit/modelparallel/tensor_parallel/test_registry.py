"""What takes a registered module's place: its arguments, its hooks, and when it stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opensmd.modelparallel.tensor_parallel import registry
from opensmd.modelparallel.tensor_parallel.registry import counterpart, tp_register


class Taking(nn.Module):
    """A distributed module that says what it was made and called with."""

    def __init__(self, width: int, *, bias: bool = True, fast: bool = False) -> None:
        super().__init__()
        self.made_with = (width, bias, fast)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
        """All of its arguments."""
        return x, scale


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    yield


def make(**hooks: Any) -> type[nn.Module]:
    @tp_register(Taking, **hooks)
    class Own(nn.Module):
        def __init__(self, width: int, bias: bool = True) -> None:
            super().__init__()

    return Own


def test_the_counterpart_is_made_with_the_arguments_of_the_module_and_those_of_the_context() -> None:
    module = make()(3, bias=False).eval()
    made = counterpart(module, {"fast": True, "unknown": 1})
    assert isinstance(made, Taking) and made.made_with == (3, False, True) and not made.training


def test_hooks_translate_arguments_calls_and_results() -> None:
    own = make(
        init_hook=lambda width, bias=True: ((2 * width,), {}),
        forward_hook=lambda x: ((x,), {"scale": 5.0}),
        return_hook=lambda output: output[1],
    )
    made = counterpart(own(3), {})
    assert isinstance(made, Taking) and made.made_with == (6, True, False)
    assert made(torch.ones(1)) == 5.0


def test_a_module_stays_if_its_hook_says_so_or_it_is_older_or_of_another_class() -> None:
    assert counterpart(make(init_hook=lambda *_, **__: None)(3), {}) is None
    early = nn.Bilinear(2, 2, 2)
    registry.tp_register_with_module(nn.Bilinear, Taking)
    assert counterpart(early, {}) is None

    class Sub(make()):  # type: ignore[misc]
        pass

    assert counterpart(Sub(3), {}) is None


def test_a_module_is_refused_if_what_the_script_but_not_its_constructor_has_attached_would_be_lost() -> None:
    @tp_register(Taking)
    class Own(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)
            self.inner.register_forward_hook(lambda *_: None)
            self.inner.forward = self.inner.forward  # type: ignore[method-assign]

    assert isinstance(counterpart(Own(1), {}), Taking)
    attach: list[Callable[[Any], Any]] = [
        lambda own: own.register_forward_pre_hook(print),
        lambda own: own.inner.register_full_backward_hook(print),
        lambda own: own.inner.register_load_state_dict_pre_hook(print),
        lambda own: own.inner.weight.register_hook(print),
        lambda own: own.inner.weight.register_post_accumulate_grad_hook(print),
    ]
    for one in attach:
        own = Own(1)
        handle = one(own)
        with pytest.raises(ValueError, match=r"has hooks: register them after smp\.DistributedModel"):
            counterpart(own, {})
        handle.remove()
        assert isinstance(counterpart(own, {}), Taking)
    own = Own(1)
    own.forward = print  # type: ignore[assignment]
    with pytest.raises(ValueError, match="has got another forward"):
        counterpart(own, {})


def test_a_class_that_takes_any_keyword_gets_all_of_the_context() -> None:
    class Any_(nn.Module):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            self.given = given

    class Own(nn.Module):
        pass

    registry.tp_register_with_module(Own, Any_)
    made = counterpart(Own(), {"one": 1})
    assert isinstance(made, Any_) and made.given == {"one": 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((nn.Linear(1, 1), Taking), "expected a class of torch.nn.Module"),
        ((nn.Linear, int), "expected a class of torch.nn.Module"),
        ((nn.Linear, Taking, "hook"), "a hook must be a function"),
    ],
)
def test_what_is_no_class_or_no_function_is_refused(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        registry.tp_register_with_module(*given)
