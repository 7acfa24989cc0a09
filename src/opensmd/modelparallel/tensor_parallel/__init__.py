"""Tensor parallelism: modules whose parameters are split over the ranks of a tensor-parallel group.

Inside a distributed module (*the shared region*) activations are the same on all ranks of the group, and so
are their gradients; only what lies between a column-split and a row-split linear differs. Collectives run in
modules without children alone, which the pipeline never cuts in two.

Begin with ``distributed_module``, then ``registry``, which says what a module becomes. Imports ``ranks``,
``compatibility``, ``redirection``, of ``precision`` what makes modules narrow, of ``dry_run`` whether it is
under way, and of the ``runtime`` what compares a step's inputs and random numbers.
"""
