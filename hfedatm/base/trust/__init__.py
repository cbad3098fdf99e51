"""What a node believes and what it allows: who sent a task, and what its owner permits."""
