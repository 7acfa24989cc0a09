"""Keeping activations of checkpointed layers out of the device's memory until their backward is near.

Begin with ``offloading``. Imports no other folder of modelparallel; the runtime imports this.
"""
