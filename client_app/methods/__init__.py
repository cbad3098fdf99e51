"""Client methods: how a client trains. One file each, found by its name."""
