"""What a run of a model shows: costs by unit, what units produce and use, and tensors carried out by hooks.

Begin with ``observer``, which sees every operation; ``data_flow`` follows tensors between units,
``weight_terms`` those computed from weights alone, ``escaped_tensors`` those that hooks carry out,
``backward_reach`` finds operations without a backward, and ``weight_gradient_memory`` covers split backwards.
Imports ``planning``, ``timing``, and the runtime's tensors.
"""
