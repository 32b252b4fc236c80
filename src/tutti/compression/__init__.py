"""Fewer bytes between ranks: codecs of flat gradients, and the exchanges that sum what is coded over a group."""
