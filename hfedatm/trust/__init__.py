"""What a node believes and what it allows: the owner's policy, and who may ask for what."""
