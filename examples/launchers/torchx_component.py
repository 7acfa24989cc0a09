"""A component for TorchX: smdrun on as many hosts as wanted.

    torchx run -s local_cwd torchx_component.py:smdrun --script train.py --j 1x2
    torchx run -s slurm torchx_component.py:smdrun --script train.py --j 2x8 -- --lr 0.1

The scheduler starts one smdrun a host and tells each its number and where host 0 is. TorchX reads the types
of the arguments as objects, so there is no ``from __future__ import annotations`` here.
"""

import shlex

from torchx import specs


def smdrun(
    *script_args: str,
    script: str,
    j: str = "1x2",
    image: str = ".",
    name: str = "opensmd",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    port: int = 29500,
) -> specs.AppDef:
    """Ranks of a script, started by smdrun.

    Args:
        script_args: arguments of the script, after ``--``
        script: the script, as it is called in the image
        j: hosts x ranks a host, such as 2x8
        image: what the scheduler runs in: an image, or with local_cwd a folder
        name: name of the job
        cpu: cores a host
        gpu: GPUs a host
        memMB: memory a host, in MB
        port: of host 0, where the ranks meet
    """
    hosts, _, ranks = j.partition("x")
    place = ""
    if int(hosts) > 1:
        # The variable with the address of host 0 has another name with every scheduler; host 0 may lack it.
        address = f'"$${{{specs.macros.rank0_env}:=localhost}}"'
        place = f"--nnodes {hosts} --node-rank {specs.macros.replica_id} --master-port {port} "
        place += f"--master-addr {address} "
    line = f"smdrun -n {ranks} {place}{shlex.join([script, *script_args])}"
    return specs.AppDef(
        name=name,
        roles=[
            specs.Role(
                name="rank",
                image=image,
                entrypoint="bash",
                args=["-c", line],
                num_replicas=int(hosts),
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB),
                port_map={"smdrun": port},
            )
        ],
    )
