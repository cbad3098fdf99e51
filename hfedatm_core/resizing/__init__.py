"""Networks of one family and of different width and depth: bring them to one shape and back."""

from hfedatm_core.resizing.architecture import Architecture
from hfedatm_core.resizing.fitting import Fit
from hfedatm_core.resizing.pairing import NoFit
from hfedatm_core.resizing.proving import prove

__all__ = ["Architecture", "Fit", "NoFit", "prove"]
