"""Nothing of a job stays behind, however it ends, and none starts that would hang.

Begin with ``guardian``.
"""
