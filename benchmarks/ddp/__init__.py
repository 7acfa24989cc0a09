"""A training step under DistributedDataParallel: smddp, its zero-copy buckets, gloo, and doing nothing."""
