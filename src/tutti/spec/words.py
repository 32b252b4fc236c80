"""The closed vocabularies of the specs: each word is listed once, here."""

from typing import Literal

Evidence = Literal["measured", "predicted", "published", "assumed"]
"""Where a number comes from. Every number that is shown carries one."""

Unit = Literal["samples", "tokens"]
"""What `global_batch_size` counts."""

AxisName = Literal["replicate"]
"""Mesh axes that a plan may use. A mechanism adds its axis here when it is built."""

Placement = Literal["replicate"]
"""What a layout rule may do with a module."""

Precision = Literal["full", "tf32", "bfloat16", "float16"]
"""full: the parameters' own dtype throughout; tf32: float32 with TF32 matrix products; bfloat16 and float16:
autocast over parameters in their own dtype (the master weights), float16 with loss scaling."""

SyncMode = Literal["synchronous"]
"""How stale a rank's parameters may be."""

LastBatch = Literal["keep", "drop"]
"""What happens to an epoch's short last batch."""
