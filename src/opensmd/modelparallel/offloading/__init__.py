"""Activations of checkpointed layers outside the device's memory until their backward is near.

Begin with ``offloading``; imports ``runtime.tensors``.
"""
