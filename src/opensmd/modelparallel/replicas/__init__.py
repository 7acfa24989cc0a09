"""Data parallelism over replicas of a pipeline stage, through torch's own gradient reducer."""
