"""The rank grid of model and data parallelism, its process groups, and what they can send."""
