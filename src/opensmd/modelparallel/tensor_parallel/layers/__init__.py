"""Layers with parameters split over the tensor-parallel ranks, and the loss of a split vocabulary.

Begin with ``linear``. Imports the parent folder, but no sibling.
"""
