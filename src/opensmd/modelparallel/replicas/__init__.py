"""Data parallelism over replicas of a pipeline stage, through torch's own gradient reducer.

Begin with ``reducer``; ``backward_count`` knows which backward of a step is the last. Imports ``ranks`` and
no other folder of modelparallel; the runtime imports this.
"""
