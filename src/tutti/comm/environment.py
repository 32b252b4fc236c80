"""Whether this process' environment lets ranks share memory: TUTTI_SHARED_MEMORY, on unless it says off."""

import os
from collections.abc import Mapping

SETTING = "TUTTI_SHARED_MEMORY"
ON, OFF = "on", "off"


def setting(environ: Mapping[str, str] = os.environ) -> str:
    """The variable's value, as it stands there: anything but on and off is to be refused, by all ranks together."""
    return environ.get(SETTING) or ON
