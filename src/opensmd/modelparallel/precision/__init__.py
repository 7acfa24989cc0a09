"""Training in fewer bits: 16-bit parameters with FP32 masters, and loss scaling over stages.

Begin with ``grad_scaler``, then ``half_optimizer``. Imports ``ranks``, ``state`` and ``runtime.tensors``.
"""
