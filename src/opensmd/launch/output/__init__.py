"""What users see of a job: its ranks' output, log files, and one report of what failed.

Begin with ``console``. Imports ``leftovers`` and no other package.
"""
