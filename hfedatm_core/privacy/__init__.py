"""Differential privacy for Grams and training, and an attack that shows why it is needed.

``clipping``    bound what one example or one client contributes; the sensitivity that follows
``noise``       Gaussian noise from a cryptographic source
``release``     clip, noise and repair a Gram: what a client sends
``psd``         make a noised matrix positive semi-definite again
``accounting``  the budget of a whole run, spent and planned
``dpsgd``       training with Opacus
``audit``       rebuild activations from a Gram

Gram noise protects the Grams only. The weights a client sends are private with DP-SGD alone.
"""
