"""The function with which scripts convert partial checkpoints."""

from opensmd.modelparallel.checkpoint.conversion.whole_model import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)

__all__ = ["get_full_state_dict_from_sharded_data_parallel_checkpoint"]
