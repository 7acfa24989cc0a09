"""What a run of a model shows: costs by unit, what units make and use, and which tensors leave by hooks.

Begin with ``observer``, which sees every operation; ``data_flow`` follows tensors between units,
``weight_terms`` those made of weights alone, ``escaped_tensors`` those that hooks carry out, and
``weight_gradient_memory`` is about backwards in two parts. Imports ``planning``, what takes times, and of the
runtime what knows tensors.
"""
