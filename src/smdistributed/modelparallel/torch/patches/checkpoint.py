"""Activation checkpointing of module calls."""

from opensmd.modelparallel.activation_checkpointing import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
