"""What carries the calls: torch's process groups (``tcp``, ``gloo``, ``nccl``) or a real MPI (``mpi``)."""
