"""HFedATM for your own Flower app: a strategy, a mod, and stations.

`HFedATM` takes the place of Flower's ``FedAvg``; `grams` goes into the ClientApp's mods; `stations`
puts a tier between the two.
"""

from hfedatm.flower.mod import grams
from hfedatm.flower.stations import Station, stations
from hfedatm.flower.strategy import HFedATM

__all__ = ["HFedATM", "Station", "grams", "stations"]
