"""Tensor parallelism: modules whose parameters are split over the ranks of a tensor-parallel group.

Inside a distributed module (*the shared region*), activations and their gradients are the same on all ranks
of the group, except between a column-split and a row-split linear. Collectives run only in modules without
children, which the pipeline never cuts.

Begin with ``distributed_module``, then ``registry``, which says what a module becomes. Imports ``ranks``,
``compatibility``, ``redirection``, of ``precision`` what makes modules narrow, of ``dry_run`` whether it is
under way, and of the ``runtime`` what compares a step's inputs and random numbers.
"""
