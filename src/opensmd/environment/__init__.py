"""Reading the environment: what launchers leave there, and what users set.

Imports no other package, and every other may import this. Begin with ``detect`` (who started this process),
then ``variables`` (what torch.distributed needs filled in) and ``settings`` (what users may set).
"""
