"""One dry run of the user's step function, to learn the model's structure for the partitioner.

The run uses fake tensors: nothing is computed and nothing allocated. If the script needs a value
(``.item()``) or an operation has no fake form, the step runs once for real instead. Either way, gradients,
parameters, buffers, attributes, random state and inputs are restored.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from opensmd.modelparallel.compatibility.quirks import forget_fake_results
from opensmd.modelparallel.dry_run.dry import dry, is_tracing
from opensmd.modelparallel.dry_run.fakes import Fakes
from opensmd.modelparallel.dry_run.kept_variables import KeptVariables
from opensmd.modelparallel.dry_run.measuring import Measuring
from opensmd.modelparallel.dry_run.module_tree import ModuleTree, describe
from opensmd.modelparallel.dry_run.observed_trace import trace_of
from opensmd.modelparallel.dry_run.observing.observer import Observer
from opensmd.modelparallel.dry_run.restoring import WrittenTensors
from opensmd.modelparallel.dry_run.timing.clock import Clock
from opensmd.modelparallel.dry_run.timing.stopwatch import Stopwatch
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.planning.trace import ModelTrace
from opensmd.modelparallel.precision._torch_internals import scales_made_for_real

__all__ = ["capture", "is_tracing"]

logger = logging.getLogger("opensmd.modelparallel")
_TORCH = str(Path(torch.__file__).parent)


def capture(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    device: torch.device | None = None,
    times: bool = False,
    operations: bool = False,
    memory: bool = False,
    has_data: bool = True,
) -> ModelTrace:
    """Run ``call`` once and report what ``module`` did in it.

    Args:
        module: the model; its parameters must be real on this rank.
        call: the user's step function with one microbatch's arguments. It calls ``module``; backwards in it
            do nothing unless times are measured. Writes into tensors that it holds as a ``functools.partial``
            are undone.
        device: where a timed run takes place; by default, the parameters' device.
        times: measure times in three more, real runs (``trace_execution_times``), forward and backward.
        operations: run the operations alone again, without the script, and time them if that may gain
            something and results do not depend on where modules are.
        memory: measure what is kept for backward in a real run instead of a fake one
            (``trace_memory_usage``).
        has_data: False if parameters have no data yet; then no real run takes place, even if requested.

    Returns:
        The trace. If ``call`` never called the model, its units are the modules with parameters, with only
        sizes.

    Raises:
        ValueError: the model has lazy modules that have not seen data yet.
        Exception: whatever ``call`` raises in the real run before its first backward, or in the fake one,
            unless the fakes caused it.
    """
    tree = ModuleTree(module)
    names = tree.followed()
    if not has_data:
        return _capture_without_data(module, call, tree, names, asked=times or memory)
    observer = _observe(module, call, tree, names, memory=memory)
    if observer.position.whole:
        names = tree.followed(observer.position.whole)
        observer = _observe(module, call, tree, names, memory=memory)
    if not observer.position.entered:
        logger.warning("the step function did not call the model; it is partitioned by parameter sizes alone")
        return describe(module)
    measuring = Measuring(module, call, tree, names, observer, device or tree.device)
    if times:
        return trace_of(tree, observer, measuring.of_steps())
    measured = measuring.if_doubtful()
    if measured is None and operations:
        measured = measuring.of_replays()
    return trace_of(tree, observer, measured)


def _capture_without_data(
    module: nn.Module, call: Callable[[], Any], tree: ModuleTree, names: dict[nn.Module, str], *, asked: bool
) -> ModelTrace:
    """Return what fake tensors show of ``call``, or else only sizes."""
    if asked:
        logger.warning(
            "trace_execution_times and trace_memory_usage are ignored: the parameters' initialization is "
            "delayed until there is a plan, so nothing can be measured before"
        )
    observer = _observe_fake_unless_impossible(module, call, tree, names)
    if observer is not None and observer.position.whole:
        names = tree.followed(observer.position.whole)
        observer = _observe_fake_unless_impossible(module, call, tree, names)
    if observer is None or not observer.position.entered:
        logger.warning(
            "the step function cannot run under fake tensors, and parameters' initialization is delayed, so "
            "the model is partitioned by parameter sizes alone"
        )
        return describe(module)
    return trace_of(tree, observer, None)


def _observe(
    module: nn.Module, call: Callable[[], Any], tree: ModuleTree, names: dict[nn.Module, str], *, memory: bool
) -> Observer:
    if not memory:
        observer = _observe_fake_unless_impossible(module, call, tree, names)
        if observer is not None:
            return observer
    return _observe_real(module, call, tree, names)


def _observe_fake_unless_impossible(
    module: nn.Module, call: Callable[[], Any], tree: ModuleTree, names: dict[nn.Module, str]
) -> Observer | None:
    """Run under fake tensors; None if the script or an operation needs data.

    Raises:
        Exception: the script's own, not caused by the fakes.
    """
    try:
        return _observe_fake(module, call, tree, names)
    except SMPError:
        raise
    except Exception as error:
        logger.debug("the dry run under fake tensors failed (%r); running the step once for real", error)
        if _comes_from_torch(error):  # errors of fakes are raised in torch
            return None
        try:
            _observe_fake(module, call, tree, names)
        except Exception:  # whatever it is, the real run decides whether it is the script's fault
            return None
        raise


def _comes_from_torch(error: Exception) -> bool:
    """Whether the line that raised is in torch, or in C++ code called there."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return bool(frames) and frames[0].filename.startswith(_TORCH)


def _observe_fake(
    module: nn.Module, call: Callable[[], Any], tree: ModuleTree, names: dict[nn.Module, str]
) -> Observer:
    fakes = Fakes()
    variables = KeptVariables(module)
    observer = Observer(Clock(Stopwatch()), tree.owners)
    written = WrittenTensors(module, call)
    try:
        with (
            dry(module, written, observer.backward),
            _quiet(),
            scales_made_for_real(),
            fakes,
            written,  # an operation without fake inputs is real
            observer,
            observer.saving(),
            observer.watching(names),
        ):
            observer.result(call())
    finally:
        variables.put_back()
        forget_fake_results()
        fakes.end()
    return observer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of tracebacks for what fake tensors cannot do; the following real run decides."""
    of_torch = logging.getLogger(FakeTensorMode.__module__)
    before, of_torch.disabled = of_torch.disabled, True
    try:
        yield
    finally:
        of_torch.disabled = before


def _observe_real(
    module: nn.Module, call: Callable[[], Any], tree: ModuleTree, names: dict[nn.Module, str]
) -> Observer:
    observer = Observer(Clock(Stopwatch()), tree.owners)
    written = WrittenTensors(module, call)
    try:
        with (
            dry(module, written, observer.backward),
            written,
            observer,
            observer.saving(),
            observer.watching(names),
        ):
            observer.result(call())
    except Exception as error:
        # There are no gradients, so code that needs one fails only here. By then the model has been seen.
        if isinstance(error, SMPError) or not observer.went_backward:
            raise
        logger.debug("the dry run ended after a backward (%r)", error)
    return observer
