"""Tensors whose data may be on another rank: placeholders, tags, memory layouts, structures of them."""
