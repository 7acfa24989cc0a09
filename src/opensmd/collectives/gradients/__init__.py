"""What crosses hosts when replicas average gradients: the size of buckets, fewer bytes, how long it takes.

Begin with ``compression``, a communication hook for DDP; ``cost_model`` is pure. Imports ``environment`` and
the files around this folder.
"""
