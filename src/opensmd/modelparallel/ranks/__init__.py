"""The rank grid of model and data parallelism, its process groups, and what they can send.

Begin with ``grid``, which is pure; ``groups`` makes process groups of it. Imports ``collectives`` and the
runtime's messages.
"""
