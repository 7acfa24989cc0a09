"""Tensor parallelism: modules whose parameters are split over the ranks of a tensor-parallel group.

Inside a distributed module (*the shared region*) activations are the same on all ranks of the group, and so
are their gradients; only what lies between a column-split and a row-split linear differs. Collectives run in
modules without children alone, which the pipeline never cuts in two.
"""
