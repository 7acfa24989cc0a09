"""The rank grid of model and data parallelism, its process groups, and what ranks have and send.

Begin with ``grid``, which is pure; ``groups`` makes process groups of it. ``shards`` and ``slices`` say which
part of a tensor a rank has, ``sendable`` what a group can carry; ``composite`` takes apart what it carries in
pieces. Imports no other folder of modelparallel.
"""
