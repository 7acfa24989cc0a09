"""Tensors on their way between the ranks of a pipeline, and where autograd crosses from one to another."""
