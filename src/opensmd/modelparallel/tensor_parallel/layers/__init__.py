"""Layers whose parameters the tensor-parallel ranks share, and the loss of a split vocabulary.

Begin with ``linear``. Imports the folder above, and none beside.
"""
