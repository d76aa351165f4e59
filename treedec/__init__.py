"""treedec: lossless tree-speculative decoding for Hugging Face causal LMs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treedec.acceptance import AcceptanceRule as AcceptanceRule
    from treedec.api import TreeDecoderOutput as TreeDecoderOutput
    from treedec.api import custom_generate as custom_generate
    from treedec.api import generate as generate
    from treedec.api import stream as stream
    from treedec.bounds import AcceptanceBounds as AcceptanceBounds
    from treedec.bounds import acceptance_bounds as acceptance_bounds
    from treedec.costs import CostCurve as CostCurve
    from treedec.costs import measure_costs as measure_costs
    from treedec.decode import Committed as Committed
    from treedec.drafter import Draft as Draft
    from treedec.drafter import Drafter as Drafter
    from treedec.drafter import Drafting as Drafting
    from treedec.drafter import DraftSession as DraftSession
    from treedec.drafter import DraftState as DraftState
    from treedec.drafter import Outcome as Outcome
    from treedec.growth import BestFirst as BestFirst
    from treedec.growth import DynamicTree as DynamicTree
    from treedec.growth import GrowthPolicy as GrowthPolicy
    from treedec.growth import StaticTree as StaticTree
    from treedec.heads import DraftModelDrafter as DraftModelDrafter
    from treedec.heads import EagleDrafter as EagleDrafter
    from treedec.heads import HydraDrafter as HydraDrafter
    from treedec.heads import MedusaDrafter as MedusaDrafter
    from treedec.heads import NgramDrafter as NgramDrafter
    from treedec.heads import RecurrentDrafter as RecurrentDrafter
    from treedec.heads import UnionDrafter as UnionDrafter
    from treedec.heads import load_drafter as load_drafter
    from treedec.limits import UnsupportedModel as UnsupportedModel
    from treedec.models import load_target as load_target
    from treedec.probe import ModelCheck as ModelCheck
    from treedec.probe import check_model as check_model
    from treedec.stats import DecodingStats as DecodingStats
    from treedec.target import Target as Target
    from treedec.tree import TokenTree as TokenTree
    from treedec.tree import TreeError as TreeError

__version__ = "0.1.0"

# Every public name and the module it lives in. They are imported when first used: the command line answers `--help`
# without loading torch, and the engine does not import the heads that draft for it.
_HOMES = {
    "acceptance_bounds": "bounds",
    "AcceptanceBounds": "bounds",
    "AcceptanceRule": "acceptance",
    "BestFirst": "growth",
    "check_model": "probe",
    "Committed": "decode",
    "CostCurve": "costs",
    "custom_generate": "api",
    "DecodingStats": "stats",
    "Draft": "drafter",
    "Drafter": "drafter",
    "Drafting": "drafter",
    "DraftModelDrafter": "heads",
    "DraftSession": "drafter",
    "DraftState": "drafter",
    "DynamicTree": "growth",
    "EagleDrafter": "heads",
    "generate": "api",
    "GrowthPolicy": "growth",
    "HydraDrafter": "heads",
    "load_drafter": "heads",
    "load_target": "models",
    "measure_costs": "costs",
    "MedusaDrafter": "heads",
    "ModelCheck": "probe",
    "NgramDrafter": "heads",
    "Outcome": "drafter",
    "RecurrentDrafter": "heads",
    "StaticTree": "growth",
    "stream": "api",
    "Target": "target",
    "TokenTree": "tree",
    "TreeDecoderOutput": "api",
    "TreeError": "tree",
    "UnionDrafter": "heads",
    "UnsupportedModel": "limits",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
