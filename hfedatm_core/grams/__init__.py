"""Gram matrices of layer inputs: measure, store, add and send them."""
