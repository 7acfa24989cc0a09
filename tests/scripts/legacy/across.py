"""One process of a job that spans two network namespaces: meets by every method given, sums and sends.

python -m tests.scripts.legacy.across WORLD_SIZE RANK METHOD...
"""

import sys

from opensmd.launch.torch_import import without_collector

without_collector()

import torch  # noqa: E402
import torch.distributed.deprecated as dist  # noqa: E402

from tests.scripts.legacy.calls import check_all_reduce, check_any_source, check_send_and_recv  # noqa: E402

torch.set_num_threads(1)
world_size, rank = int(sys.argv[1]), int(sys.argv[2])
for method in sys.argv[3:]:
    given = {"rank": rank} if "rank" in method else {}
    dist.init_process_group(
        "tcp", method.removesuffix("?rank"), world_size=world_size, group_name="across", **given
    )
    check_all_reduce(dist.get_rank(), list(range(world_size)), dist.group.WORLD)
    check_send_and_recv(dist.get_rank(), world_size)
    check_any_source(dist.get_rank(), world_size)
    dist.barrier()
    sys.stdout.write(f"{method.split(':')[0]} {dist.get_rank()} of {dist.get_world_size()}\n")
    dist.destroy_process_group()
