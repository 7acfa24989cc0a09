"""Refusing modules that a script has changed, because their distributed counterparts would ignore that.

A counterpart of torch's or Hugging Face's modules computes what their own code does. It has new parameters
and submodules, so whatever a script has attached to the old ones would be lost silently.
"""

from __future__ import annotations

from torch import nn

__all__ = ["require_unchanged"]

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
        if any(getattr(each, kind, None) for kind in _HOOKS):
            raise ValueError(f"{where} has hooks: register them after smp.DistributedModel")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"its {name} has hooks: register them after smp.DistributedModel")
