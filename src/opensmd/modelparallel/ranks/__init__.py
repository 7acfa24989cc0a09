"""The rank grid of model and data parallelism, its process groups, and what ranks hold and send.

Begin with ``grid``, which is pure; ``groups`` turns it into process groups. ``shards`` and ``slices`` say
which part of a tensor a rank has, and ``sendable`` what a group can carry; ``composite`` takes apart tensors
that travel in pieces. Imports no other folder of modelparallel.
"""
