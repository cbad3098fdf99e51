"""Which axes of which tensors of a network carry the same channels."""
