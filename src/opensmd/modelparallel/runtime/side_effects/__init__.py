"""What a call touches besides arguments and result: attributes, buffers, containers, random state."""
