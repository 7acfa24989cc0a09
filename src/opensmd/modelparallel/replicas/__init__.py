"""Data parallelism over replicas of a pipeline stage, through torch's own gradient reducer.

Begin with ``reducer``; ``backward_count`` knows which backward is a step's last. Imports ``ranks`` and no
other folder of modelparallel; the runtime imports this.
"""
