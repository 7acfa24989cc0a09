"""What users see of a job: lines of its ranks, log files, and one report of what failed.

Begin with ``console``. Imports ``leftovers`` and no other package.
"""
