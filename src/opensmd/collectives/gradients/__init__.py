"""What replicas send to average gradients: flattened tensors, bucket sizes, and compression.

Begin with ``flat``; ``compression`` is a communication hook for DDP. Imports ``environment`` and the files
around this folder.
"""
