"""State that the replicas of a stage share out among themselves instead of having it all on each.

Begin with ``sharded_optimizer``; imports ``ranks`` and ``state``.
"""
