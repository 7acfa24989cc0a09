"""What the replicas of a stage share out among themselves instead of having it all on each.

Begin with ``sharded_optimizer`` for the optimizer's state, and with ``placing`` for parameters and gradients;
``units`` is pure. Imports ``planning``, ``precision``, ``ranks``, ``replicas``, ``state_dicts`` and of
``tensor_parallel`` the embedding.
"""
