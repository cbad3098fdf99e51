"""Find the axes of a network's tensors that carry the same channels."""
