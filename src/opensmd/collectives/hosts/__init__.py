"""Which way collectives between hosts go, as follows from what the network does.

Begin with ``measuring``, which asks the network while a group is made; ``cost_model`` and ``choices`` are
pure. Imports ``exchange``, of the files around this folder.
"""
