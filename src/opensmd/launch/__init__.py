"""Starting ranks: the ``smdrun`` command, and what each rank does before the script.

Begin with ``cli`` and ``run`` (the launcher) or ``rank`` (a rank). The modules here import nothing heavy at
import time, so that a rank can set its affinity before torch starts.
"""
