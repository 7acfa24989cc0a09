"""The arguments that ``smp.DistributedModel`` refuses or warns about."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opensmd.modelparallel.delayed.delayed_parameter import DelayedParameter
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.whereabouts import Whereabouts
from opensmd.script_level import script_level

__all__ = [
    "refuse_elastic",
    "require_data",
    "require_elastic",
    "require_model",
    "require_passes",
    "require_tracing",
    "warn_of_untraced",
]


def require_model(module: object) -> None:
    """Raise if ``module`` cannot be distributed, or another model already is."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"smp.DistributedModel: expected a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, (torch.jit.ScriptModule, DistributedDataParallel, Whereabouts)):
        raise TypeError(
            f"smp.DistributedModel: a {type(module).__name__} cannot be distributed; give the plain module"
        )
    if state.model is not None:
        raise SMPError(
            "smp.DistributedModel: only one model of a script can be wrapped, and one is already. Put models "
            "that train together (a generator and its discriminator) into one torch.nn.Module"
        )


def require_data(module: nn.Module) -> None:
    """Raise if parameters or buffers have no values and will not get any."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in tensors if not isinstance(tensor, DelayedParameter) and tensor.is_meta]
    if empty:
        raise ValueError(
            f"smp.DistributedModel: {len(empty)} of {len(tensors)} parameters and buffers are on the meta "
            f"device and have no values, such as {empty[0]!r}. Give them values before the first call of a "
            "smp.step function (load the model without offloading, or call to_empty and initialize it), or "
            "make the model in smp.delay_param_initialization, with which each rank makes those of its "
            "partition alone"
        )


def require_tracing(trace_device: object, trace_execution_times: bool | None) -> None:
    """Raise if a timed dry run is requested but impossible."""
    if trace_device not in ("cpu", "gpu"):
        raise ValueError(f"trace_device must be 'cpu' or 'gpu', got {trace_device!r}")
    if trace_execution_times and trace_device == "cpu":
        raise ValueError("trace_execution_times must be False with trace_device='cpu'")


def require_passes(passes: object) -> None:
    """Raise if ``backward_passes_per_step`` is not a number of steps."""
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int of at least 1, got {passes!r}")


def require_elastic(passes: int, *, gradient_as_bucket_view: bool) -> None:
    """Raise for arguments under which only some replicas have gradients, which elastic jobs cannot handle."""
    if state.cfg.elastic is None:
        return
    if passes > 1:
        raise ValueError(
            "backward_passes_per_step cannot be combined with the setting elastic: a replica that joins "
            "between two passes would lack the gradients of the first"
        )
    if gradient_as_bucket_view:
        raise ValueError(
            "gradient_as_bucket_view cannot be combined with the setting elastic: gradients would lie in "
            "the memory of process groups, which end when a replica is lost"
        )


def refuse_elastic(name: str) -> None:
    """Raise if a method of the model cannot be used in elastic jobs."""
    if state.cfg.elastic is not None:
        raise SMPError(
            f"model.{name} cannot be combined with the setting elastic: what it keeps belongs to process "
            "groups that end when a replica is lost or joins"
        )


def warn_of_untraced(*, split: bool, by_hand: bool) -> None:
    """Warn if measuring for the plan was requested but will not happen.

    Args:
        split: there are several partitions.
        by_hand: places are given by hand.
    """
    if split and not by_hand:
        return
    why = "auto_partition is False" if split else "there is one partition"
    warnings.warn(
        f"trace_execution_times and trace_memory_usage are ignored: {why}, so there is nothing to trace",
        stacklevel=script_level(),
    )
