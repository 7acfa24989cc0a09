"""Refusing modules that a script has changed, because their distributed counterparts would ignore that.

A counterpart of torch's or Hugging Face's modules computes what their own code does. Any counterpart has new
parameters and submodules, so whatever a script has attached to the old ones would be lost silently.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["number_of_next_hook", "require_no_hooks", "require_unchanged"]

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


def require_unchanged(module: nn.Module) -> None:
    """Refuse a module that does not compute what its class does.

    Raises:
        ValueError: it or a submodule has hooks, a replaced ``forward``, or a class from the script.
    """
    for name, each in module.named_modules():
        where = f"its {name}" if name else "it"
        if not type(each).__module__.startswith(_LIBRARIES):
            raise ValueError(f"{where} is the script's own {type(each).__name__}")
        if "forward" in vars(each):
            raise ValueError(
                f"{where} has got another forward (smp.set_activation_checkpointing does that, too: call it "
                "after smp.DistributedModel)"
            )
    require_no_hooks(module)


def number_of_next_hook() -> int:
    """Return a number that is less than those of all later hooks; torch counts them."""
    return RemovableHandle(OrderedDict()).id


def require_no_hooks(module: nn.Module, since: int = 0) -> None:
    """Refuse a module whose hooks would be lost.

    Args:
        since: a :func:`number_of_next_hook`; older hooks do not matter.

    Raises:
        ValueError: it, a submodule or a parameter has hooks.
    """
    for name, each in module.named_modules():
        if any(number >= since for kind in _HOOKS for number in getattr(each, kind, None) or ()):
            where = f"its {name}" if name else "it"
            raise ValueError(f"{where} has hooks: register them after smp.DistributedModel")
    for name, parameter in module.named_parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if any(number >= since for number in hooks or ()):
                raise ValueError(f"its {name} has hooks: register them after smp.DistributedModel")
