"""Context parallel: ranks hold parts of the same sequences, and attention sees the whole.

Position-wise layers (linear, embedding, norm, activation) run on a rank's own tokens. Attention is computed exactly
over all of them, by ring attention or by exchanging heads for tokens. What mixes tokens in any other way is found by
comparing a short piece of the first batch with the model on one device, and refused by name.

order.py      which tokens a rank holds
batch.py      cutting batches, joining outputs
tiles.py      attention of some queries to some keys, forward and backward
ring.py       ring attention; exchange.py: the all-to-all form
attention.py  a call of scaled_dot_product_attention, read and sent to one of the two
calls.py      how the model's calls are found
families.py   Hugging Face models: their own seam for attention
check.py      the comparison with one device
parts.py      all of it around a microbatch
"""

from tutti.parallel.context.context_parallel import Sequences, sequences_of

__all__ = ["Sequences", "sequences_of"]
