"""Attention weights of the tokens of a sequence, by layer and head, as records, JSON and one HTML page."""

from deepseek_attn.lab.inspect.inspection import inspect_attention
from deepseek_attn.lab.inspect.page import token_texts, write_page
from deepseek_attn.lab.inspect.records import (
    HeadRead,
    IndexRead,
    IndexSummary,
    Inspection,
    LayerRead,
    LayerSummary,
    QueryRead,
    Shares,
)

__all__ = [
    "HeadRead",
    "IndexRead",
    "IndexSummary",
    "Inspection",
    "LayerRead",
    "LayerSummary",
    "QueryRead",
    "Shares",
    "inspect_attention",
    "token_texts",
    "write_page",
]
