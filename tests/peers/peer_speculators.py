"""The peer's side of test_speculators.py. It runs in an environment of its own, which has `speculators` and no treedec:

    peer_speculators.py draft FOLDER INPUTS OUTPUTS             the logits of the speculator in FOLDER
    peer_speculators.py make FOLDER TARGET OPTIONS              write a random one for the model in TARGET
    peer_speculators.py convert SOURCE FOLDER TARGET OPTIONS    take over a checkpoint of SafeAILab/EAGLE

INPUTS is a safetensors file with `hidden` `[T, F]`, `tokens` `[T]` and `steps` `[1]`; OUTPUTS one with `logits`
`[steps, T, Vd]` and `ids` `[Vd]`, the target's ids that they score. Logits at place j of step s follow the pairs 0..j
of a true hidden state and the token after it, and s fed-back nodes, whose tokens are those of places j+1..j+s.
OPTIONS is JSON: for `make` the draft layer's configuration as `layer` beside arguments of `from_training_args`, for
`convert` arguments of `convert_model`.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.convert.entrypoints import convert_model
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import AutoConfig


def draft(folder: str, inputs: str, outputs: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs whole blocks of 128
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    # What a checkpoint lacks the peer makes up, and what it does not know it leaves out, with a warning at most.
    stored = set(load_file(Path(folder) / "model.safetensors"))
    expected = {name for name in model.state_dict() if not name.startswith("verifier_")}
    if stored | {"embed_tokens.weight"} != expected:
        sys.exit(f"unknown to the peer: {sorted(stored - expected)}; missed by it: {sorted(expected - stored)}")
    if "embed_tokens.weight" not in stored:
        # It means to take the target's, but looks for NaN where transformers leaves whatever was in memory.
        model._load_verifier_weights(overwrite_embed_tokens=True)
    given = load_file(inputs)
    logits: list[torch.Tensor] = []  # the model returns ids only
    model.lm_head.register_forward_hook(lambda module, arguments, output: logits.append(output[0]))
    with torch.no_grad():
        model(
            given["hidden"][None],
            given["tokens"][None],
            torch.zeros_like(given["tokens"])[None],  # all of one document
            ttt_steps=int(given["steps"]),
        )
    save_file({"logits": torch.stack(logits), "ids": drafted_ids(model)}, outputs)


def drafted_ids(model: Eagle3DraftModel) -> torch.Tensor:
    """The target's ids that can be drafted; the maps must be those that the peer makes for them."""
    if model.t2d is None:
        return torch.arange(model.draft_vocab_size)
    ids = model.t2d.nonzero()[:, 0]
    d2t, t2d = build_vocab_mappings_from_distribution(dict.fromkeys(ids.tolist(), 1), len(ids), len(model.t2d))
    if not torch.equal(d2t, model.d2t) or not torch.equal(t2d, model.t2d):
        sys.exit(f"d2t should be {d2t.tolist()} for these ids, not {model.d2t.tolist()}")
    return ids


def make(folder: str, target: str, options: str) -> None:
    arguments = json.loads(options)
    layer = AutoConfig.for_model(**arguments.pop("layer"))
    kept, t2d, d2t = arguments["draft_vocab_size"], None, None
    if kept < layer.vocab_size:
        frequencies = {token: token % 2 for token in range(layer.vocab_size)}  # so that it keeps odd ids
        d2t, t2d = build_vocab_mappings_from_distribution(frequencies, kept, layer.vocab_size)
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_attn_impl="eager", ttt_steps=3, verifier_name_or_path=target, **arguments
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name != "embed_tokens.weight":  # which it keeps as the target's
            parameter.data = 0.3 * torch.randn(parameter.shape) + (parameter.dim() == 1)  # vectors are norms
    model.save_pretrained(folder)


def convert(source: str, folder: str, target: str, options: str) -> None:
    convert_model(source, target, "eagle3", folder, **json.loads(options))


if __name__ == "__main__":
    {"draft": draft, "make": make, "convert": convert}[sys.argv[1]](*sys.argv[2:])
