"""Loaded last by the server that the tests' ranks are forked from: what all of them would work out alone is known.

What has been loaded is set apart from the collection of garbage, so that ranks do not copy the pages they share.
"""

import gc

from tutti.trainer.run_header import environment_hash

environment_hash()
gc.freeze()
