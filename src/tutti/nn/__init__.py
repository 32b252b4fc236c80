"""Model parts and marks that torch lacks; all of it runs on one device."""

from tutti.nn.mixture import MixtureOfExperts, auxiliary_loss
from tutti.nn.tables import EmbeddingTables

__all__ = ["EmbeddingTables", "MixtureOfExperts", "auxiliary_loss"]
