"""How much larger than its tensors a rank of a split model is, by what its memory comes from."""
