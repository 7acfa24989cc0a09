"""What replicas send when they average gradients: many tensors as few, the size of buckets, and fewer bytes.

Begin with ``flat``; ``compression`` is a communication hook for DDP. Imports ``environment`` and the files
around this folder.
"""
