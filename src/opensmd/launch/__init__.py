"""Starting ranks: the ``smdrun`` command, and what each rank does before the script runs.

Begin with ``cli`` and ``run`` (the launcher) or ``rank`` (a rank). Imports what starts and watches
processes, never modelparallel, and nothing heavy at import time: a rank sets its affinity before torch
starts.
"""
