"""What a launcher has given a script, which needs no library to find it out."""

import json
import os

NAMES = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SMDATAPARALLEL_LOCAL_RANK",
    "SMDATAPARALLEL_USE_SINGLENODE",
    "OMP_NUM_THREADS",
    "SM_MODEL_DIR",
    "SM_NUM_GPUS",
    "SM_HOSTS",
    "SM_CURRENT_HOST",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def say(**more) -> None:
    """All of it in a line, with what else is known."""
    known = {name: os.environ.get(name) for name in NAMES}
    print("place " + json.dumps({**known, "cpus": sorted(os.sched_getaffinity(0)), **more}), flush=True)


if __name__ == "__main__":
    say(rank=int(os.environ["RANK"]))
