"""Loaded last by the server that the tests' ranks are forked from: what all of them would work out alone is known.

What has been loaded is set apart from the collection of garbage, so that ranks do not copy the pages they share.
"""

import gc

from numba.core.registry import cpu_target

from tutti.trainer.run_header import environment_hash

environment_hash()
cpu_target.typing_context.refresh()  # the registries that the first kernel of a rank would load: 0.4 s
cpu_target.target_context.refresh()
gc.freeze()
