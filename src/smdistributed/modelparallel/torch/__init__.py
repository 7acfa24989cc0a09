"""``import smdistributed.modelparallel.torch as smp``: thin names for :mod:`opensmd.modelparallel`."""

from opensmd.environment.variables import fill

fill()  # before anything else: gives torch.distributed what the launcher set

from opensmd.modelparallel.activation_checkpointing import (  # noqa: E402
    checkpoint,
    checkpoint_sequential,
    set_activation_checkpointing,
)
from opensmd.modelparallel.checkpoint.resume_folder import resume_from_checkpoint  # noqa: E402
from opensmd.modelparallel.checkpoint.save_folder import save_checkpoint  # noqa: E402
from opensmd.modelparallel.checkpoint.save_load import load, save  # noqa: E402
from opensmd.modelparallel.communicate import (  # noqa: E402
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from opensmd.modelparallel.delayed.contexts import delay_param_initialization, model_creation  # noqa: E402
from opensmd.modelparallel.dry_run.capture import is_tracing  # noqa: E402
from opensmd.modelparallel.elastic.steps import elastic_steps  # noqa: E402
from opensmd.modelparallel.init import init, shutdown  # noqa: E402
from opensmd.modelparallel.manual_partition import partition, set_partition  # noqa: E402
from opensmd.modelparallel.optimizer import DistributedOptimizer  # noqa: E402
from opensmd.modelparallel.outputs import StepOutput  # noqa: E402
from opensmd.modelparallel.ranks.grid import CommGroup, RankType  # noqa: E402
from opensmd.modelparallel.state import state  # noqa: E402
from opensmd.modelparallel.step import step  # noqa: E402
from opensmd.modelparallel.tensor_parallel import random  # noqa: E402
from opensmd.modelparallel.tensor_parallel.contexts import (  # noqa: E402
    set_tensor_parallelism,
    tensor_parallelism,
)
from opensmd.modelparallel.tensor_parallel.registry import tp_register, tp_register_with_module  # noqa: E402
from opensmd.modelparallel.world import (  # noqa: E402
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    is_initialized,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from smdistributed.modelparallel.torch import amp, model, nn, optimizers, utils  # noqa: E402
from smdistributed.modelparallel.torch.model import DistributedModel  # noqa: E402

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK

__all__ = [
    "init",
    "shutdown",
    "is_initialized",
    "state",
    "step",
    "elastic_steps",
    "StepOutput",
    "DistributedModel",
    "DistributedOptimizer",
    "partition",
    "set_partition",
    "is_tracing",
    "save",
    "load",
    "save_checkpoint",
    "resume_from_checkpoint",
    "checkpoint",
    "checkpoint_sequential",
    "set_activation_checkpointing",
    "amp",
    "model",
    "nn",
    "optimizers",
    "random",
    "utils",
    "broadcast",
    "send",
    "recv_from",
    "allgather",
    "barrier",
    "dp_barrier",
    "mp_barrier",
    "CommGroup",
    "RankType",
    "WORLD",
    "MP_GROUP",
    "DP_GROUP",
    "PP_GROUP",
    "TP_GROUP",
    "RDP_GROUP",
    "WORLD_RANK",
    "MP_RANK",
    "DP_RANK",
    "PP_RANK",
    "TP_RANK",
    "RDP_RANK",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "dp_rank",
    "dp_size",
    "pp_rank",
    "pp_size",
    "tp_rank",
    "tp_size",
    "rdp_rank",
    "rdp_size",
    "get_mp_group",
    "get_dp_group",
    "get_pp_group",
    "get_tp_group",
    "get_rdp_group",
    "get_world_process_group",
    "get_mp_process_group",
    "get_dp_process_group",
    "get_pp_process_group",
    "get_tp_process_group",
    "get_rdp_process_group",
    "delay_param_initialization",
    "model_creation",
    "tensor_parallelism",
    "set_tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]
