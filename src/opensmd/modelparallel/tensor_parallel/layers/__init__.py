"""Layers whose parameters the tensor-parallel ranks share, and the loss of a split vocabulary."""
