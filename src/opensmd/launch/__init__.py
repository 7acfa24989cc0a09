"""Starting ranks: what launched this process, the environment a script expects, and the ``smdrun`` command.

The modules here import nothing heavy at import time, so that a rank can set its affinity before torch starts.
"""
