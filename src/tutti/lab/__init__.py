"""A laboratory of hosts on one machine: network namespaces on a bridge, connected by links of limited rate."""

from tutti.lab.lab import Lab
from tutti.lab.lab_network import parse_rate, rate_words
from tutti.lab.lab_run import Finished

__all__ = ["Finished", "Lab", "parse_rate", "rate_words"]
