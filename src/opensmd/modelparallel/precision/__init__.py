"""Training in fewer bits: loss scaling over stages.

Begin with ``grad_scaler``; imports ``ranks`` and ``state``.
"""
