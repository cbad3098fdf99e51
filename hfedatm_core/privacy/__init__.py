"""Differential privacy for Grams and training, and an attack that shows why it is needed.

``mechanisms``  what is clipped, the sensitivity that follows, and whom the noise hides
``clipping``    bound the norm of a Gram
``noise``       Gaussian noise from a cryptographic source
``release``     clip and noise the Grams that a client sends
``psd``         make a noised matrix positive semi-definite again
``accounting``  the budget of a whole run, spent and planned
``dpsgd``       training with Opacus
``audit``       rebuild activations from a Gram

Gram noise protects the Grams only. The weights that a client sends are private only with DP-SGD.
"""
