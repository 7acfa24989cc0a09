"""Hugging Face's switch for activation checkpoints, for distributed layers that replaced theirs."""

from __future__ import annotations

from torch import nn

from opensmd.modelparallel.activation_checkpointing import set_activation_checkpointing

__all__ = ["keep_checkpointing"]


def keep_checkpointing(original: nn.Module, layers: nn.Sequential) -> None:
    """Checkpoint distributed layers if ``gradient_checkpointing_enable`` was called on the original."""
    if any(getattr(module, "gradient_checkpointing", False) for module in original.modules()):
        set_activation_checkpointing(layers, pack_args_as_tuple=True)
