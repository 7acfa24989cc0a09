"""broadcast, all_gather, reduce_scatter, all_to_all and send/recv at 4 KiB, 1 MiB and 64 MiB."""
