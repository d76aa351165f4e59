"""Everything that drafts, and the checkpoints it comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from treedec.drafter import Drafter, NoDrafts
from treedec.growth import BestFirst, DynamicTree, GrowthPolicy
from treedec.heads.checkpoint import METHODS, Stored, build_heads, is_heads_folder
from treedec.heads.draft_model import DraftModelDrafter
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead
from treedec.heads.formats import detect, read
from treedec.heads.hydra import HydraConfig, HydraDrafter, HydraHeads
from treedec.heads.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from treedec.heads.ngram import NgramDrafter
from treedec.heads.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentHead
from treedec.heads.union import UnionDrafter
from treedec.models import DEMO, on_device

__all__ = [
    "DraftModelDrafter",
    "EagleConfig",
    "EagleDrafter",
    "EagleHead",
    "HydraConfig",
    "HydraDrafter",
    "HydraHeads",
    "MedusaConfig",
    "MedusaDrafter",
    "MedusaHeads",
    "NgramDrafter",
    "RecurrentConfig",
    "RecurrentDrafter",
    "RecurrentHead",
    "UnionDrafter",
    "load_drafter",
]

# Shipped heads by target, best method first; the folder is package data.
_PRETRAINED = Path(__file__).parent / "pretrained"
_SHIPPED = {DEMO: ("SmolLM2-135M-Instruct", ("eagle3", "recurrent", "medusa"))}


def load_drafter(
    name: str | os.PathLike[str], model: PreTrainedModel, *, tree: GrowthPolicy | DynamicTree | int | None = None
) -> Drafter:
    """Load something that drafts for `model`.

    Args:
        name: `"demo"` (the best shipped heads of the demo target) or `"demo:METHOD"`; `"ngram"`; `"none"`; a folder of
            trained heads, treedec's own or in a format that `treedec.heads.formats` reads; or a folder of a small
            causal LM that shares the target's vocabulary. Several, as in `"demo+ngram"`, draft together.
        model: the target; heads are loaded in its dtype, on its device.
        tree: a growth policy, or the number of nodes per tree, the root included; None for the method's default: a
            chain of four of a draft model, else up to 16 nodes that pay their costs (`Target.costs`). Heads whose
            candidates depend on the path (Hydra, recurrent, EAGLE) take a `DynamicTree`, Medusa's the others; a draft
            model takes a number only.

    Raises:
        FileNotFoundError: no such name or folder, or a folder without heads or a model.
        ValueError: the checkpoint is broken, belongs to another model, or does not fit `tree`.
    """
    if isinstance(name, str) and "+" in name and not Path(name).exists():
        if tree is not None and not isinstance(tree, int):
            raise ValueError(f"the trees of several drafters are merged: tree must be a number of nodes, not {tree!r}")
        # Heads grow as large a tree as the merged one; a chain of that length would cost more than it brings.
        members = [
            load_drafter(member, model, tree=tree if _holds_heads(member) else None) for member in name.split("+")
        ]
        return UnionDrafter(*members) if tree is None else UnionDrafter(*members, nodes=tree)
    if name == "none":
        return NoDrafts()
    if name == "ngram":
        return NgramDrafter() if tree is None else NgramDrafter(depth=_chain_depth(tree))
    folder = shipped_folder(str(name)) or Path(name)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no drafter {str(name)!r}: give 'demo', 'demo:medusa', 'ngram', 'none', a folder of trained heads or of a "
            "draft model, or several of these joined by '+'"
        )
    if detect(folder) is not None:
        stored = read(folder, model)
        growth = _growth(stored, tree)
        return METHODS[stored.method].drafter(build_heads(stored, model), model, growth)
    draft_model = on_device(load_draft_model(folder, model.dtype), model.device).eval()
    return DraftModelDrafter(draft_model) if tree is None else DraftModelDrafter(draft_model, depth=_chain_depth(tree))


def load_draft_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM with every one of its weights from the folder.

    Raises:
        FileNotFoundError: the folder holds neither heads nor a model.
        ValueError: the model in it cannot be loaded, or lacks weights.
    """
    hint = f"; did you mean {folder / 'heads'}?" if is_heads_folder(folder / "heads") else ""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds neither trained heads nor a draft model: it has no config.json"
            + (hint or "; give the folder that does")
        )
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except Exception as error:  # from_pretrained raises whatever the damage leads to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ValueError(
            f"{folder} holds no draft model that can be loaded ({reason})" + (hint or "; copy or save it again")
        ) from error
    # With output_loading_info it is a pair, which its annotation does not say.
    model, loading = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    if missing := sorted(loading["missing_keys"]):
        # transformers fills them with random numbers, which would draft noise without ever failing.
        raise ValueError(
            f"{folder} holds a draft model without {len(missing)} of its weights, {missing[0]!r} for one"
            + (hint or "; copy or save it again")
        )
    return model


def _growth(stored: Stored, tree: GrowthPolicy | DynamicTree | int | None) -> GrowthPolicy | DynamicTree:
    """The policy that `tree` stands for with these heads."""
    sequential = METHODS[stored.method].sequential
    if tree is not None and not isinstance(tree, int):
        if isinstance(tree, DynamicTree) != sequential:
            kinds = "DynamicTree" if sequential else "BestFirst or StaticTree"
            raise ValueError(f"{stored.method} heads grow their trees by {kinds}, not {type(tree).__name__}")
        return tree
    if sequential:
        deepest = getattr(stored.config, "heads", None)
        if tree is None:
            return DynamicTree(depth=min(DynamicTree.depth, deepest or DynamicTree.depth))
        # Who asks for so many nodes gets them, likely or not, and so a level more per 16 of them, not as many as there
        # are likely nodes for. Large trees gain by being wide and deep: with the demo target's recurrent heads and 32
        # nodes, levels of 8 nodes with 8 candidates each are accepted 3 % further than those of 4, and 7 levels 2 %
        # further than 5.
        depth, spread = 5 + tree // 16, max(DynamicTree.width, tree // 4)
        return DynamicTree(tree, min(depth, deepest or depth), spread, spread, min_probability=0.0, min_reach=0.0)
    if tree is None:
        # Less never pays on two cores. With few sure candidates the tree shrinks, down to its root.
        return BestFirst(nodes=16, min_probability=0.03)
    return BestFirst(nodes=tree)


def _holds_heads(name: str) -> bool:
    folder = shipped_folder(name) or Path(name)
    return folder.is_dir() and detect(folder) is not None


def _chain_depth(tree: GrowthPolicy | DynamicTree | int) -> int:
    if not isinstance(tree, int) or tree < 2:
        raise ValueError(f"this drafter proposes chains: tree must be a number of nodes of at least 2, not {tree!r}")
    return tree - 1


def shipped_folder(name: str) -> Path | None:
    """The folder of `"demo"` or `"demo:METHOD"`; None for a name that no shipped heads have.

    Raises:
        FileNotFoundError: heads of that method are not shipped.
    """
    target, _, method = name.partition(":")
    if target not in _SHIPPED:
        return None
    folder, methods = _SHIPPED[target]
    if method and method not in methods:
        raise FileNotFoundError(f"no shipped {method!r} heads for {target!r}; there are {', '.join(methods)}")
    return _PRETRAINED / folder / (method or methods[0])
