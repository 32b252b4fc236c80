"""Loading: what it takes to bring one sample of the data in, before any model sees it."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from tutti.config import quantities
from tutti.config.words import Evidence
from tutti.errors import SpecError

# In a file these may be texts: "4 ms", "110 kB".
_Seconds = Annotated[float, BeforeValidator(quantities.reader(quantities.SECONDS, "4 ms"))]
_Bytes = Annotated[float, BeforeValidator(quantities.reader(quantities.BYTES, "110 kB"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What one sample costs to load, and how ranks load.

    `core_s`: seconds of one core that reading, decoding and collating take where storage is quick; `wait_s`: seconds
    more in which whoever loads it waits for something else (a server, a sleep). `stored_nbytes`: read from storage.
    `workers`: processes of each rank that load ahead, while it computes; 0: it loads itself, between steps. `stream`:
    every rank reads all samples of a batch and keeps its own. `parts`: along the space axis a rank reads only its part
    of a sample. Raises SpecError for negative numbers.
    """

    core_s: _Seconds = 0.0
    wait_s: _Seconds = 0.0
    stored_nbytes: _Bytes = 0.0
    workers: int = 0
    stream: bool = False
    parts: bool = False
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        for name in ("core_s", "wait_s", "stored_nbytes", "workers"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"loading.{name} = {getattr(self, name):g}; give 0 or a number above it")
