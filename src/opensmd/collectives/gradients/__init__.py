"""What crosses hosts when replicas average gradients: the size of buckets, and fewer bytes.

Begin with ``compression``, a communication hook for DDP. Imports ``environment`` and the files around this
folder.
"""
