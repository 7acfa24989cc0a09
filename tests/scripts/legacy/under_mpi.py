"""Runs the whole table of calls under ``mpiexec``; prints one line a rank that it got through."""

import os
import sys

from opensmd.launch.torch_import import without_collector

without_collector()

import torch  # noqa: E402
import torch.distributed.deprecated as dist  # noqa: E402

from opensmd.legacy.transports import mpi  # noqa: E402
from tests.scripts.legacy.calls import check_all  # noqa: E402

torch.set_num_threads(1)
for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
# As the tutorial of the time wrote it: MPI knows better.
dist.init_process_group("MPI", rank=0, world_size=0)
assert dist.get_world_size() == int(sys.argv[1])
check_all()
dist.destroy_process_group()
dist.init_process_group("mpi")
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [dist.get_world_size()] * 2
if dist.get_rank() < 2:
    # copies of sends are few at a time, but no send waits for what this rank is to receive
    mpi.BUFFERED_BYTES = 8
    other, come = 1 - dist.get_rank(), [torch.zeros(3) for _ in range(3)]
    receives = [dist.irecv(each, other) for each in come]
    for number in range(3):
        dist.send(torch.full((3,), float(number)), other)
    for number, request in enumerate(receives):
        request.wait()
        assert come[number].eq(number).all()
if dist.get_rank() == 0:
    # nobody waits for this one before the script ends: it is delivered all the same
    dist.send(torch.full((100_000,), 7.0), 1)
elif dist.get_rank() == 1:
    last = torch.zeros(100_000)
    dist.recv(last)
    assert last.eq(7).all()
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} got through\n")
