"""Which distributed module replaces a module: ``smp.tp_register``, and what is known without it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

from opensmd.modelparallel.state import state
from opensmd.modelparallel.tensor_parallel.huggingface.originals import note_original, original_of
from opensmd.modelparallel.tensor_parallel.unchanged import (
    Attached,
    require_nothing_attached,
    require_unchanged,
)

__all__ = ["counterpart", "tp_register", "tp_register_with_module"]

Hook = Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]
Module = TypeVar("Module", bound=type[nn.Module])
CONSTRUCTION = "_smp_construction"


class Construction(NamedTuple):
    """What a module of a registered class remembers.

    Attributes:
        args, kwargs: those of its constructor.
        attached: what the constructor has attached to it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attached: Attached


@dataclass(frozen=True)
class Registration:
    """A distributed counterpart with its hooks; see :func:`tp_register`."""

    dist_module: type[nn.Module]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Known:
    """A class that can be distributed without a registration.

    Attributes:
        place: the module whose ``distributed(module, config)`` creates the counterpart.
        translated: whether state dicts of the counterpart have other names, and ``place`` has
            ``TRANSLATIONS``.
    """

    place: str
    translated: bool = True


# torch's and Hugging Face's, by name, so that nothing is imported that the script does not use.
_HERE = "opensmd.modelparallel.tensor_parallel"
_TORCH = Known(f"{_HERE}.layers.torch_modules", translated=False)
_GPT2, _GPTJ, _GPTNEO, _BERT, _ROBERTA = (
    Known(f"{_HERE}.huggingface.{name}") for name in ("gpt2", "gptj", "gptneo", "bert", "roberta")
)
_KNOWN = {
    "torch.nn.modules.linear.Linear": _TORCH,
    "torch.nn.modules.sparse.Embedding": _TORCH,
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": _GPT2,
    "transformers.models.gpt2.modeling_gpt2.GPT2Model": _GPT2,
    "transformers.models.gptj.modeling_gptj.GPTJForCausalLM": _GPTJ,
    "transformers.models.gptj.modeling_gptj.GPTJModel": _GPTJ,
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM": _GPTNEO,
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoModel": _GPTNEO,
    "transformers.models.bert.modeling_bert.BertEncoder": _BERT,
    "transformers.models.roberta.modeling_roberta.RobertaEncoder": _ROBERTA,
}
_registered: dict[type[nn.Module], Registration] = {}


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[Module], Module]:
    """Decorate a class so that under ``smp.tensor_parallelism`` its modules become ``dist_module``.

    Args:
        dist_module: the distributed counterpart, preferably a ``smp.nn.DistributedModule``.
        init_hook: takes the arguments of the class's constructor and returns ``(args, kwargs)`` for that of
            ``dist_module``; None passes them on. If it returns None, the module is not replaced.
        forward_hook: the same for every call of ``forward``.
        return_hook: converts the result of ``dist_module`` to what the class would return.

    Raises:
        TypeError: an argument is not a module class, or not a function.
    """

    def register(module_cls: Module) -> Module:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Apply :func:`tp_register` to a class that cannot be edited; existing modules are not replaced.

    Raises:
        TypeError: an argument is not a module class, or not a function.
    """
    for cls in (module_cls, dist_module):
        if not isinstance(cls, type) or not issubclass(cls, nn.Module):
            raise TypeError(f"smp.tp_register: expected a class of torch.nn.Module, got {cls!r:.80}")
    for hook in (init_hook, forward_hook, return_hook):
        if hook is not None and not callable(hook):
            raise TypeError(f"smp.tp_register: a hook must be a function, got {hook!r:.80}")
    if module_cls not in _registered:
        _note_construction(module_cls)
    _registered[module_cls] = Registration(dist_module, init_hook, forward_hook, return_hook)


def counterpart(module: nn.Module, config: dict[str, Any]) -> nn.Module | None:
    """Return the distributed module that replaces ``module``; None if there is none.

    Args:
        config: arguments that override those of the module.

    Raises:
        ValueError: the number of ranks does not divide its sizes, or the script has changed it.
    """
    registration = _registered.get(type(module))
    if registration is not None:
        return _registered_counterpart(module, registration, config)
    known = _KNOWN.get(f"{type(module).__module__}.{type(module).__qualname__}")
    if known is None:
        return None
    require_unchanged(module)
    place = importlib.import_module(known.place)
    if not known.translated:
        unchanged: nn.Module = place.distributed(module, config)
        return unchanged
    original = original_of(module, place.TRANSLATIONS)
    distributed: nn.Module = place.distributed(module, config)
    note_original(distributed, original)
    if place.TRANSLATIONS not in state.module_manager.translate_functions:
        state.module_manager.translate_functions.append(place.TRANSLATIONS)
    return distributed


def _registered_counterpart(
    module: nn.Module, registration: Registration, config: dict[str, Any]
) -> nn.Module | None:
    if CONSTRUCTION not in module.__dict__:
        return None  # created before its class was registered
    args, kwargs, attached = module.__dict__[CONSTRUCTION]
    if registration.init_hook is not None:
        hooked = registration.init_hook(*args, **kwargs)
        if hooked is None:
            return None
        args, kwargs = hooked
    require_nothing_attached(module, but=attached)
    distributed = registration.dist_module(*args, **{**kwargs, **_taken(registration.dist_module, config)})
    distributed.train(module.training)
    if registration.forward_hook is not None:
        forward_hook = registration.forward_hook
        distributed.register_forward_pre_hook(
            lambda _, args, kwargs: forward_hook(*args, **kwargs), with_kwargs=True
        )
    if registration.return_hook is not None:
        returned = registration.return_hook
        distributed.register_forward_hook(lambda _, args, output: returned(output))
    return distributed


def _taken(dist_module: type[nn.Module], config: dict[str, Any]) -> dict[str, Any]:
    """Return those of a context's arguments that a distributed module accepts."""
    parameters = inspect.signature(dist_module.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return config
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in config.items() if name in names}


def _note_construction(module_cls: type[nn.Module]) -> None:
    """Make modules of exactly this class remember how they were constructed."""
    original = module_cls.__init__

    @functools.wraps(original)
    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is module_cls:
            self.__dict__[CONSTRUCTION] = Construction(args, kwargs, Attached.now(self))

    module_cls.__init__ = noting  # type: ignore[method-assign]
