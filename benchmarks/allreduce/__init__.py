"""all_reduce from 4 B to 256 MiB: smddp, zero-copy smddp, gloo, MPI, and two floors."""
