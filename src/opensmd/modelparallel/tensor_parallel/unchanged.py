"""Refusing modules that a script has changed, because their distributed counterparts would ignore that.

A counterpart of torch's or Hugging Face's modules computes what their own code does. Any counterpart has new
parameters and submodules, so whatever a script has attached to the old ones would be lost silently.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Attached", "require_nothing_attached", "require_unchanged"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_LIBRARIES = ("torch.", "transformers.")


class Attached(NamedTuple):
    """What a module's own constructor may have attached to it.

    Attributes:
        next_hook: the number of the first later hook; torch counts them.
        forwards: the names of submodules whose ``forward`` is not that of their class.
    """

    next_hook: int = 0
    forwards: frozenset[str] = frozenset()

    @classmethod
    def now(cls, module: nn.Module) -> Attached:
        """Return what is attached to ``module`` so far."""
        forwards = (name for name, submodule in module.named_modules() if "forward" in vars(submodule))
        return cls(RemovableHandle(OrderedDict()).id, frozenset(forwards))


def require_unchanged(module: nn.Module) -> None:
    """Refuse a module that does not compute what its class does.

    Raises:
        ValueError: it or a submodule has hooks, a replaced ``forward``, or a class from the script.
    """
    for name, submodule in module.named_modules():
        if not type(submodule).__module__.startswith(_LIBRARIES):
            raise ValueError(f"{_named(name)} is the script's own {type(submodule).__name__}")
    require_nothing_attached(module, but=Attached())


def require_nothing_attached(module: nn.Module, but: Attached) -> None:
    """Refuse a module to which the script has attached what would be lost.

    Args:
        but: what its constructor has attached, which does not matter.

    Raises:
        ValueError: it, a submodule or a parameter has hooks, or another ``forward``.
    """
    for name, submodule in module.named_modules():
        if "forward" in vars(submodule) and name not in but.forwards:
            raise ValueError(
                f"{_named(name)} has got another forward (smp.set_activation_checkpointing does that, too: "
                "call it after smp.DistributedModel)"
            )
        if any(number >= but.next_hook for kind in _HOOKS for number in getattr(submodule, kind, None) or ()):
            raise ValueError(f"{_named(name)} has hooks: register them after smp.DistributedModel")
    for name, parameter in module.named_parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if any(number >= but.next_hook for number in hooks or ()):
                raise ValueError(f"its {name} has hooks: register them after smp.DistributedModel")


def _named(submodule: str) -> str:
    return f"its {submodule}" if submodule else "it"
