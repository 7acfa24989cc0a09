"""Leaving nothing of a job behind, however it ends, and starting none that would hang.

Begin with ``guardian``. Imports no other package, because it must work when all else has failed.
"""
