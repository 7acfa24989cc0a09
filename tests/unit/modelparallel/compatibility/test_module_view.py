"""``model.module.module``: one level more, for scripts that reach through the originals' wrappers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import unwrap_model as transformers_unwrapped

from opensmd.modelparallel.compatibility.module_view import view_of
from opensmd.modelparallel.state_dicts.whereabouts import Whereabouts


class Net(nn.Sequential):
    """A class that counts those derived from it, and its ends."""

    derived: list[type] = []  # noqa: RUF012 - all of them
    ends = 0

    def __init_subclass__(cls) -> None:
        Net.derived.append(cls)

    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Linear(2, width), nn.Tanh())
        self.config = {"width": width}
        self.steps = 0

    def __del__(self) -> None:
        Net.ends += 1

    def count(self) -> int:
        """Count in the module itself."""
        self.steps += 1
        return self.steps


class Wrapped(nn.Module):
    """A user's model that has an attribute ``module`` of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: Tensor) -> Tensor:
        """What is inside."""
        out: Tensor = self.module(x)
        return out


def unwrapped(model: Any) -> Any:
    """What transformers, Accelerate and others have done to reach a model inside wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def test_both_levels_are_of_the_users_class_and_unwrapping_ends_at_the_users_module() -> None:
    net = Net()
    model = Whereabouts(net)
    for level in (model.module, model.module.module):
        assert isinstance(level, Net) and level.__class__ is Net and level == net and hash(level) == hash(net)
    assert model.module.module is net is model.get_module() is unwrapped(model) and not hasattr(net, "module")
    assert model.module is model.module and next(model.children()) is net
    assert [name for name, _ in model.named_parameters()] == ["module.0.weight", "module.0.bias"]
    assert not Net.derived


def test_libraries_unwrap_whichever_level_they_are_given_to_the_users_module() -> None:
    """Two views lie above a module in 16 bits, as wrappers did in the originals."""
    for levels in (1, 2):
        net = Net()
        top = view_of(net, levels)
        for level in (top, top.module, Whereabouts(net)):
            assert unwrapped(level) is net is transformers_unwrapped(level, recursive=True)
        for _ in range(levels):
            assert isinstance(top, Net) and top.config is net.config
            top = top.module
        assert top is net


def test_attributes_methods_and_calls_of_a_level_are_the_users_modules() -> None:
    net = Net()
    model = Whereabouts(net)
    x = torch.randn(4, 2)
    assert model.module(x).equal(net(x)) and model.module.forward(x).equal(net(x))
    assert getattr(model.module, "config") is net.config and len(model.module) == 2  # noqa: B009
    assert model.module[0] is net[0] and [model.module.count(), net.count(), net.steps] == [1, 2, 2]
    model.module.width = 5
    model.module.head = nn.Linear(1, 1)
    assert net.width == 5 and "head" in dict(net.named_children())
    del model.module.head, model.module.width
    assert not hasattr(net, "head") and not hasattr(net, "width")
    model.module.eval()
    assert not net.training and not net[0].training
    assert model.module.module.state_dict().keys() == net.state_dict().keys()
    seen: list[Any] = []
    model.module.register_forward_hook(lambda module, *_: seen.append(module))
    net(x)
    assert seen == [net] and seen[0] is net


def test_copies_of_a_level_are_copies_of_the_users_module_which_ends_once() -> None:
    model = Whereabouts(Net(4))
    for twin in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert type(twin) is Net and twin[0].weight.equal(model.module[0].weight)
    del twin
    Net.ends = 0
    assert model.module.config
    del model
    assert Net.ends == 1


def test_torch_traces_scripts_exports_and_calls_a_level_like_the_users_module() -> None:
    net = Net()
    level, x = Whereabouts(net).module, torch.randn(4, 2)
    assert torch.jit.trace(level, x)(x).equal(net(x)) and torch.jit.script(level)(x).equal(net(x))
    assert torch.export.export(level, (x,)).module()(x).equal(net(x))
    assert torch.fx.symbolic_trace(level)(x).equal(net(x))
    assert torch.func.functional_call(level, dict(net.named_parameters()), (x,)).equal(net(x))


def test_a_class_that_a_library_gives_to_a_level_is_given_to_the_users_module() -> None:
    linear = nn.Linear(2, 2)
    model = Whereabouts(linear)
    nn.utils.parametrizations.weight_norm(model.module)
    assert type(linear).__name__ == "ParametrizedLinear" == type(model.module).__name__
    assert model.module.weight.equal(linear.weight) and model.module.module is linear


def test_an_attribute_called_module_of_the_users_own_is_what_is_meant() -> None:
    inner = nn.Linear(2, 2)
    model = Whereabouts(Wrapped(inner))
    assert model.module is model.get_module() and model.module.module is inner is unwrapped(model)
    net = Net()
    model = Whereabouts(net)
    level = model.module
    level.module = inner
    assert net.module is inner is level.module and model.module is net
    assert Whereabouts(Whereabouts(Net()).module).get_module().__class__ is Net


def test_a_level_given_to_another_model_is_the_users_module_there() -> None:
    net = Net()
    assert Whereabouts(Whereabouts(net).module).get_module() is net
