"""On one host the old calls cost at most 1.3 times the same collective through torch.distributed."""
