"""What launchers leave in the environment, and what users set there: read here, by everybody, in one place.

Imports no other package, and every other may import this. Begin with ``detect`` (who started this process),
then ``variables`` (what torch.distributed needs filled in) and ``settings`` (what users may set).
"""
