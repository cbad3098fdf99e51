"""Networks that were trained apart: fold their norms, match, merge and repair them."""
