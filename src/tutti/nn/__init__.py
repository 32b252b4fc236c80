"""Modules and annotations that torch lacks; all of them work on one device."""

from tutti.nn.embedding_tables import EmbeddingTables
from tutti.nn.masked_attention import attention, document_numbers
from tutti.nn.mixture import MixtureOfExperts, auxiliary_loss
from tutti.nn.sparse_attention import BlockPattern, BlockSparseSelfAttention, block_sparse_attention

__all__ = [
    "BlockPattern",
    "BlockSparseSelfAttention",
    "EmbeddingTables",
    "MixtureOfExperts",
    "attention",
    "auxiliary_loss",
    "block_sparse_attention",
    "document_numbers",
]
