"""EAGLE-3 heads against `speculators`, the package of the vLLM project: what either writes, the other reads and drafts
the same with, from the target's hidden states as from what its own steps feed back.

The package wants another transformers than treedec, so it runs in an environment of its own; see peer_speculators.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit import VOCAB, fresh_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from treedec import Target
from treedec.drafter import Drafting, DraftState
from treedec.growth import DynamicTree
from treedec.heads.checkpoint import CheckpointError, build_heads, save_heads
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead
from treedec.heads.formats import detect, read, write
from treedec.models import Fingerprint

pytestmark = pytest.mark.peer

PYTHON = "TREEDEC_PEER_SPECULATORS"
STEPS, TOKENS, TAPS = 3, 9, (1, 2, 5)
LAYER: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
# What differs from `LAYER`, in the names of `EagleConfig`.
CASES: dict[str, dict[str, Any]] = {
    "original": {"draft_vocab_size": 40},
    "of-its-trainer": {
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
    },
    "eagle-3.1": {"draft_vocab_size": VOCAB, "fc_norm": True, "norm_output": True, "attention_bias": True},
    "qwen3": {
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "qk_norm": True,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, **LLAMA3},
    },
}
cases = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


@pytest.fixture(scope="module")
def peer():
    """Runs peer_speculators.py with arguments."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.fail(
            f"{PYTHON} must name the Python of an environment with the package speculators: `make test-peers` makes "
            "one; by hand, `python3 -m venv DIR`, `DIR/bin/pip install speculators==0.9.0`, and where torch is built "
            f"for CPUs `DIR/bin/pip uninstall torchvision torchaudio`; then {PYTHON}=DIR/bin/python"
        )

    def run(*arguments: object) -> None:
        command = [python, str(Path(__file__).with_name("peer_speculators.py")), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]

    return run


class OnDisk(NamedTuple):
    """A target, which the peer loads parts of with every speculator."""

    model: PreTrainedModel
    folder: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = fresh_model(dtype=torch.float32, num_hidden_layers=5)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return OnDisk(model, folder)


@pytest.fixture(scope="module")
def given():
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(TOKENS, len(TAPS) * LAYER["hidden_size"], generator=generator),
        "tokens": torch.randint(VOCAB, (TOKENS,), generator=generator),
        "steps": torch.tensor([STEPS]),
    }


@cases
def test_the_peer_drafts_with_what_treedec_writes(options, peer, target, given, tmp_path):
    head = random_head(**options, own_embeddings=True, own_lm_head=True)
    written(head, target, "speculators", tmp_path)
    assert_alike(head, target.model, given, drafted_by(peer, tmp_path / "speculators", given, tmp_path))


def test_the_peer_drafts_with_a_head_that_shares_the_target_s_embeddings_and_lm_head(peer, target, given, tmp_path):
    head = random_head(draft_vocab_size=40)
    written(head, target, "speculators", tmp_path)
    assert_alike(head, target.model, given, drafted_by(peer, tmp_path / "speculators", given, tmp_path))


def test_the_peer_takes_over_what_treedec_writes_for_the_authors_code(peer, target, given, tmp_path):
    head = random_head(draft_vocab_size=40, own_lm_head=True)
    written(head, target, "eagle3", tmp_path)
    taps = json.dumps({"eagle_aux_hidden_state_layer_ids": TAPS})  # which it does not look for in the checkpoint
    peer("convert", tmp_path / "eagle3", tmp_path / "converted", target.folder, taps)
    assert_alike(head, target.model, given, drafted_by(peer, tmp_path / "converted", given, tmp_path))


@cases
def test_treedec_drafts_with_what_the_peer_writes(options, peer, target, given, tmp_path):
    folder = tmp_path / "made"
    made(peer, target, options, folder)
    assert detect(folder) == "speculators"
    stored = read(folder)
    expected = {**LAYER, "target_hidden_size": 32, "features": TAPS, "own_embeddings": True, "own_lm_head": True}
    expected["sliding_window"] = 2048
    assert stored.config == EagleConfig(**expected | options)
    assert stored.base == str(target.folder)
    peers = drafted_by(peer, folder, given, tmp_path)
    assert_alike(build_heads(stored, target.model), target.model, given, peers)
    for option in ("norm_before_residual", "norm_output"):  # controls
        other = replace(stored.config, **{option: not getattr(stored.config, option)})
        ours = drafted(build_heads(replace(stored, config=other), target.model), target.model, given)
        assert (ours - peers["logits"][:, : ours.shape[1]])[-1].abs().max() > 0.1


def test_what_treedec_has_no_layer_for_is_refused(peer, target, tmp_path):
    made(peer, target, {"draft_vocab_size": 40}, tmp_path / "made", layers=2)
    with pytest.raises(CheckpointError, match=r"layers\.1\."):
        read(tmp_path / "made")


def random_head(**options: Any) -> EagleHead:
    """A head that drafts ids spread over the vocabulary."""
    config = EagleConfig(**{**LAYER, "target_hidden_size": 32, "features": TAPS} | options)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
    head = EagleHead(config, ids).requires_grad_(False).eval()
    for parameter in head.parameters():
        parameter.normal_(std=0.3, generator=generator).add_(parameter.dim() == 1)  # vectors are norms or biases
    return head


def written(head: EagleHead, target: OnDisk, name: str, folder: Path) -> None:
    """The head as a checkpoint of treedec's, and from there as one of the format `name`."""
    save_heads(folder / "treedec", head, Fingerprint.of(target.model), {}, dtype=torch.float32)
    stored = replace(read(folder / "treedec"), base=str(target.folder))  # where the peer looks for the target
    write(folder / name, stored, name, target.model)


def made(peer: Any, target: OnDisk, options: dict[str, Any], folder: Path, layers: int = 1) -> None:
    """A random speculator, by the peer; its trainer gives all layers a sliding window unless told not to."""
    of_layer = {name: options[name] for name in ("attention_bias", "rope_parameters") if name in options}
    window = {"sliding_window": 2048, "use_sliding_window": True, "layer_types": ["sliding_attention"] * layers}
    kind = {"model_type": "qwen3" if options.get("qk_norm") else "llama", "num_hidden_layers": layers}
    arguments = {name: value for name, value in options.items() if name not in (*of_layer, "qk_norm")}
    arguments = {"norm_before_residual": False, "target_layer_ids": TAPS} | arguments
    peer("make", folder, target.folder, json.dumps({"layer": LAYER | of_layer | window | kind, **arguments}))


def drafted(head: EagleHead, model: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    """`[steps, n, Vd]` logits of as many chains as have tokens for all steps, by treedec: each one a row."""
    rows, tokens = range(TOKENS - STEPS + 1), given["tokens"]
    session = EagleDrafter(head, model, DynamicTree(depth=STEPS)).start(Target(model), len(rows), TOKENS + 1)
    state = DraftState(
        texts=[[0, *tokens[: row + 1].tolist()] for row in rows], hidden=given["hidden"],
        features=[given["hidden"][: row + 1] for row in rows], room=[STEPS] * len(rows), budget=64,
        drafting=Drafting.TOP, shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip
    with torch.no_grad():
        logits = [session.begin(state)]
        for step in range(1, STEPS):
            parents = torch.full((len(rows), 1), step - 2)
            logits.append(session.expand(tokens[step : step + len(rows), None], parents)[:, 0])
    return torch.stack(logits)


def drafted_by(peer: Any, folder: Path, given: dict[str, Tensor], scratch: Path) -> dict[str, Tensor]:
    """`logits` `[steps, T, Vd]` by the peer, which go on where treedec's chains lack tokens, and `ids` `[Vd]`."""
    save_file(given, scratch / "inputs.safetensors")
    peer("draft", folder, scratch / "inputs.safetensors", scratch / "outputs.safetensors")
    return load_file(scratch / "outputs.safetensors")


def assert_alike(head: EagleHead, model: PreTrainedModel, given: dict[str, Tensor], peers: dict[str, Tensor]) -> None:
    assert torch.equal(head.draft_ids, peers["ids"])
    ours = drafted(head, model, given)
    torch.testing.assert_close(ours, peers["logits"][:, : ours.shape[1]], atol=1e-4, rtol=0)
