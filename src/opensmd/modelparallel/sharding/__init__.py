"""What the replicas of a stage split among themselves instead of replicating it.

Begin with ``sharded_optimizer`` for the optimizer's state, and with ``placing`` for parameters and gradients;
``units`` is pure. Imports ``planning``, ``precision``, ``ranks``, ``replicas``, ``state_dicts``, from
``tensor_parallel`` the embedding, and from ``runtime`` what says where tensors live.
"""
