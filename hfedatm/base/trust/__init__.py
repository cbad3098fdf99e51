"""What a node trusts and allows: proofs of who sent a task, and the owner's policy."""
