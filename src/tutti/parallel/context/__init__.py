"""Context parallelism: ranks hold parts of the same sequences, and attention sees the whole sequences.

Position-wise layers (linear, embedding, norm, activation) compute on a rank's own tokens. Attention over all tokens is
computed exactly, by ring attention or by exchanging heads for tokens. The first batch is used for a check: a short
piece of it is computed on parts and on whole sequences. A module that mixes tokens otherwise is refused by name.

sequence_order.py     which tokens a rank holds; cutting batches and joining outputs
ring_attention.py     ring attention; nn/attention_blocks.py computes its blocks
context_attention.py  a call of scaled_dot_product_attention or tutti.nn.attention, by the ring or by an all-to-all
attention_calls.py    how the model's calls are intercepted, also in Hugging Face models
context_parallel.py   all of this around a microbatch, and the check of the first batch
"""

from tutti.parallel.context.context_parallel import Sequences, sequences_of

__all__ = ["Sequences", "sequences_of"]
