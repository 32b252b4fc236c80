"""Gradient compression: codecs of flat gradients, and reducers that all-reduce encoded gradients over a group."""
