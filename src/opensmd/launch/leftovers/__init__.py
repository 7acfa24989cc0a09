"""Nothing of a job stays behind, however it ends, and none starts that would hang.

Begin with ``guardian``. Imports no other package: it must run when all else has failed.
"""
