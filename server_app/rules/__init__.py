"""Server rules: how station models become one. One file each, found by its name."""
