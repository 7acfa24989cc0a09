"""Choosing algorithms for collectives between hosts, depending on the network.

Begin with ``measuring``, which measures the network while a group is created; ``cost_model`` and ``choices``
are pure. Of the files around this folder, imports ``exchange``.
"""
