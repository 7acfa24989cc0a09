"""The private parts of torch's DistributedDataParallel that this package touches, in one place.

Tested by tests/ranks/data_parallel/test_dataparallel_ddp.py, which fails if torch changes them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["rebuild_reducer"]


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Hook the gradients of the module's parameters again, as unpickling a DistributedDataParallel does.

    Moving a parameter to another device or dtype gives it a new gradient accumulator, while the reducer's
    hooks stay with the old one: without an error, no gradient would be exchanged any more. Local to the rank.
    """
    parameters, expect_sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
    names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    model.device = parameters[0].device
    model.device_type = parameters[0].device.type
    model._ddp_init_helper(  # type: ignore[no-untyped-call]
        parameters, expect_sparse, names, model.static_graph
    )
    for hook, state in model._comm_hooks:
        dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]
