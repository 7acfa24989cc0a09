"""Sharded parameters beside torch's FSDP2 used directly."""
