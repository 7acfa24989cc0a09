"""The distributed transformer: attention, output, layer, stack and language model, outermost last."""
