"""treedec: lossless tree-speculative decoding for Hugging Face causal LMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treedec.acceptance import AcceptanceRule
from treedec.api import TreeDecoderOutput, generate, stream
from treedec.decode import Committed, DecodingStats
from treedec.drafter import Draft, Drafter, Drafting, DraftSession, DraftState, Outcome
from treedec.growth import BestFirst, GrowthPolicy, StaticTree
from treedec.models import load_target
from treedec.target import Target, UnsupportedModel
from treedec.tree import TokenTree, TreeError

if TYPE_CHECKING:
    from treedec.heads import load_drafter

__version__ = "0.1.0"

__all__ = [
    "AcceptanceRule",
    "BestFirst",
    "Committed",
    "DecodingStats",
    "Draft",
    "DraftSession",
    "DraftState",
    "Drafter",
    "Drafting",
    "GrowthPolicy",
    "Outcome",
    "StaticTree",
    "Target",
    "TokenTree",
    "TreeDecoderOutput",
    "TreeError",
    "UnsupportedModel",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
]


def __getattr__(name: str) -> Any:
    # The engine does not import what drafts for it; only the name is offered here.
    if name == "load_drafter":
        from treedec.heads import load_drafter

        return load_drafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
