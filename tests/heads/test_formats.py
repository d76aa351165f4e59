"""Checkpoints of others: tiny ones of the real layouts, read into treedec's, and what is wrong with damaged ones."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import treedec
from treedec import BestFirst
from treedec.growth import DynamicTree
from treedec.heads import load_drafter
from treedec.heads.checkpoint import METHODS, CheckpointError, build_heads, save_heads
from treedec.heads.formats import detect, read, unwritable, write
from treedec.heads.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from treedec.models import Fingerprint

VOCAB, HIDDEN, LAYERS, HEADS = 97, 32, 8, 3
DRAFT_IDS = [3, 5, 8, 13, 21, 34, 55, 89, 90, 91, 92, 93]
INNER, ATTENTION_HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 8


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**(shape | changes), num_attention_heads=4, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def noise(*shape):
    return 0.1 * torch.randn(shape)


def put(folder, config, tensors, name="model.safetensors"):
    """A checkpoint folder."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: value.clone() for key, value in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


# What published configurations say: two heads, whatever the file holds.
MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}


def medusa_tensors(blocks=1, tied=True, lm_head=True):
    tensors = {}
    for head in range(HEADS):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = noise(HIDDEN, HIDDEN)
            tensors[f"{head}.{block}.linear.bias"] = noise(HIDDEN)
            if tied and block:
                for part in ("weight", "bias"):
                    tensors[f"{head}.{block}.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]
        if lm_head:
            tensors[f"{head}.{blocks}.weight"] = noise(VOCAB, HIDDEN)
    return tensors


def vllm_tensors(blocks=2, bias=True, shared=False, rows=VOCAB):
    tensors = {}
    for head in range(HEADS):
        for block in range(blocks):
            tensors[f"blocks.{head}.layers.{block}.weight"] = noise(HIDDEN, HIDDEN)
            if bias:
                tensors[f"blocks.{head}.layers.{block}.bias"] = noise(HIDDEN)
    for head in range(1 if shared else HEADS):
        tensors[f"lm_heads.{head}.weight"] = noise(rows, HIDDEN)
    return tensors


VLLM = {
    "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_heads": HEADS, "num_hidden_layers": 2, "medusa_fc_bias": True,
}  # fmt: skip
LAYER = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": ATTENTION_HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": None, "vocab_size": VOCAB, "hidden_act": "silu",
}  # fmt: skip
EAGLE = {"architectures": ["LlamaForCausalLM"], **LAYER, "bias": False}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, "draft_vocab_size": len(DRAFT_IDS)}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": LAYER | {"head_dim": HEAD_DIM},
    "draft_vocab_size": len(DRAFT_IDS),
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
}


def layer_tensors(prefix, width):
    projections = {
        "self_attn.q_proj": (ATTENTION_HEADS * HEAD_DIM, width), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width), "self_attn.o_proj": (HIDDEN, ATTENTION_HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": noise(*shape) for name, shape in projections.items()}
    return tensors | {f"{prefix}post_attention_layernorm.weight": 1 + noise(HIDDEN)}


def eagle_tensors(bias=False):
    tensors = {"embed_tokens.weight": noise(VOCAB, HIDDEN), "fc.weight": noise(HIDDEN, 2 * HIDDEN)}
    return tensors | layer_tensors("layers.0.", HIDDEN) | ({"fc.bias": noise(HIDDEN)} if bias else {})


def eagle3_tensors(prefix="midlayer.", ids=DRAFT_IDS):
    tensors = {"fc.weight": noise(HIDDEN, 3 * HIDDEN), **layer_tensors(prefix, 2 * HIDDEN)}
    tensors |= {f"{prefix}{name}.weight": 1 + noise(HIDDEN) for name in ("hidden_norm", "input_layernorm")}
    tensors |= {"norm.weight": 1 + noise(HIDDEN), "lm_head.weight": noise(VOCAB if ids is None else len(ids), HIDDEN)}
    if ids is not None:
        tensors["d2t"] = torch.tensor([token - place for place, token in enumerate(ids)])
        tensors["t2d"] = torch.tensor([token in ids for token in range(VOCAB)])
    return tensors


def hydra_tensors():
    tensors = {"input_embed_fn.weight": noise(VOCAB, HIDDEN)}
    for head in range(HEADS):
        for part in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.0.{part}.weight"] = noise(HIDDEN, (head + 2) * HIDDEN)
            tensors[f"hydra_mlp.{head}.0.{part}.bias"] = noise(HIDDEN)
        tensors[f"hydra_lm_head.{head}.weight"] = noise(VOCAB, HIDDEN)
        tensors[f"hydra_lm_head.{head}.bias"] = noise(VOCAB)
    return tensors


HYDRA = {"hydra_num_heads": HEADS, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}


def merged(model):
    """A model with its heads in one folder, as the second version of Medusa publishes them."""
    return {**model.state_dict(), **{f"medusa_head.{key}": value for key, value in medusa_tensors().items()}}


# Per checkpoint: its format, the drafter that it makes, and how it is laid out.
CHECKPOINTS = {
    "medusa.pt": ("medusa", "medusa", lambda f, m: put(f, MEDUSA, medusa_tensors(), "medusa_lm_head.pt")),
    "medusa.safetensors": (
        "medusa", "medusa", lambda f, m: put(f, MEDUSA, medusa_tensors(2), "medusa_lm_head.safetensors")
    ),
    "medusa without LM heads": (
        "medusa", "medusa", lambda f, m: put(f, MEDUSA, medusa_tensors(lm_head=False), "medusa_lm_head.safetensors")
    ),
    "medusa merged": ("medusa", "medusa", lambda f, m: put(f, m.config.to_dict(), merged(m))),
    "vllm": ("vllm-medusa", "medusa", lambda f, m: put(f, VLLM, vllm_tensors())),
    "vllm trimmed": (
        "vllm-medusa", "medusa",
        lambda f, m: put(
            f, VLLM | {"truncated_vocab_size": len(DRAFT_IDS)},
            vllm_tensors(rows=len(DRAFT_IDS)) | {"token_map": torch.tensor(DRAFT_IDS)},
        ),
    ),
    "hydra": ("hydra", "hydra", lambda f, m: put(f, HYDRA, hydra_tensors(), "hydra_lm_head.pt")),
    "eagle": ("eagle", "eagle", lambda f, m: put(f, EAGLE, eagle_tensors(), "pytorch_model.bin")),
    "eagle3": ("eagle3", "eagle3", lambda f, m: put(f, EAGLE3, eagle3_tensors())),
    "eagle3 of vLLM": ("eagle3", "eagle3", lambda f, m: put(f, EAGLE3, eagle3_tensors("layers.0."))),
    "speculators": ("speculators", "eagle3", lambda f, m: put(f, SPECULATORS, eagle3_tensors("layers.0."))),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_others_is_recognised_and_drafts(tmp_path, model, name):
    expected, method, make = CHECKPOINTS[name]
    folder = make(tmp_path / "heads", model)
    assert detect(folder) == expected
    drafter = load_drafter(folder, model)
    assert drafter.name == method
    ids = torch.randint(VOCAB, (1, 7))
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    assert torch.equal(treedec.generate(model, ids, drafter, max_new_tokens=10), plain)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_others_becomes_one_of_treedecs_bit_for_bit(tmp_path, model, name):
    folder = CHECKPOINTS[name][2](tmp_path / "heads", model)
    stored = read(folder, model)
    write(tmp_path / "native", stored, "treedec", model)
    again = read(tmp_path / "native")
    assert (again.method, again.config, again.base) == (stored.method, stored.config, stored.base)
    assert again.target == Fingerprint.of(model)
    assert_same(again.tensors, stored.tensors)
    built = build_heads(again, model).state_dict()
    assert_same(built, stored.tensors)


def assert_same(ours, theirs):
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


# From a checkpoint to a format that others load, and back.
ROUND_TRIPS = [
    *((name, "vllm-medusa") for name in CHECKPOINTS if "medusa" in name or "vllm" in name),
    *((name, kind) for name in CHECKPOINTS for kind in ("eagle3", "speculators") if "eagle3" in name),
    ("speculators", "speculators"),
]


@pytest.mark.parametrize(("name", "to"), ROUND_TRIPS)
def test_round_trips_are_bit_identical(tmp_path, model, name, to):
    stored = read(CHECKPOINTS[name][2](tmp_path / "heads", model), model)
    write(tmp_path / "there", stored, to, model)
    assert detect(tmp_path / "there") == to
    again = read(tmp_path / "there")
    assert (again.method, again.config) == (stored.method, stored.config)
    assert_same(again.tensors, stored.tensors)


def test_medusa_heads_are_counted_and_keep_their_lm_heads(tmp_path, model):
    tensors = medusa_tensors()
    stored = read(put(tmp_path / "a", MEDUSA, tensors, "medusa_lm_head.pt"))
    assert stored.config == MedusaConfig(HIDDEN, VOCAB, HEADS, 1, VOCAB, own_lm_heads=True)
    assert stored.base == "lmsys/vicuna-7b-v1.3" and stored.target is None
    for head in range(HEADS):
        assert torch.equal(stored.tensors["weight"][head, 0], tensors[f"{head}.0.linear.weight"])
        assert torch.equal(stored.tensors["lm_heads"][head], tensors[f"{head}.1.weight"])


def test_medusa_heads_score_as_the_original_does(tmp_path, model):
    """Each head on its own, written out as the original's `Sequential` of blocks and a linear layer."""
    tensors = medusa_tensors(blocks=2)
    folder = put(tmp_path / "a", MEDUSA, tensors, "medusa_lm_head.pt")
    hidden = noise(5, HIDDEN)
    logits = load_drafter(folder, model).logits(hidden, HEADS)
    assert logits.shape == (HEADS, 5, VOCAB)
    for head in range(HEADS):
        x = hidden
        for block in range(2):
            x = x + F.silu(
                F.linear(x, tensors[f"{head}.{block}.linear.weight"], tensors[f"{head}.{block}.linear.bias"])
            )
        torch.testing.assert_close(logits[head], x @ tensors[f"{head}.2.weight"].T)


def test_own_lm_heads_over_a_trimmed_vocabulary(model):
    """One depth at a time, with the ids that belong to the rows."""
    config = MedusaConfig(HIDDEN, VOCAB, HEADS, 1, len(DRAFT_IDS), own_lm_heads=True)
    heads = MedusaHeads(config, torch.tensor(DRAFT_IDS))
    with torch.no_grad():
        heads.lm_heads.normal_()
    drafter = MedusaDrafter(heads, model, BestFirst(branching=4))
    hidden = noise(2, HIDDEN)
    for depths in range(1, HEADS + 1):
        expected = torch.einsum("th,kvh->ktv", hidden, heads.lm_heads[:depths])
        torch.testing.assert_close(drafter.logits(hidden, depths), expected)


def test_tied_blocks_may_be_stored_once(tmp_path):
    """What safetensors keeps of a list of one module."""
    tensors = medusa_tensors(blocks=3)
    whole = read(put(tmp_path / "a", MEDUSA, tensors, "medusa_lm_head.pt"))
    once = {key: value for key, value in tensors.items() if not re.match(r"\d\.[12]\.linear", key)}
    assert_same(read(put(tmp_path / "b", MEDUSA, once, "medusa_lm_head.safetensors")).tensors, whole.tensors)


def test_heads_without_lm_head_need_a_target(tmp_path, model):
    folder = put(tmp_path / "a", MEDUSA, medusa_tensors(lm_head=False), "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"vocab_size open.*--target"):
        read(folder)
    assert read(folder, model).config == MedusaConfig(HIDDEN, VOCAB, HEADS, 1, VOCAB)


def test_a_shared_lm_head_of_vllm_must_be_the_targets(tmp_path, model):
    tensors = vllm_tensors(shared=True)
    folder = put(tmp_path / "a", VLLM | {"original_lm_head": True}, tensors)
    with pytest.raises(CheckpointError, match="LM head of another target"):
        load_drafter(folder, model)
    tensors["lm_heads.0.weight"] = model.lm_head.weight.bfloat16().float()
    put(folder, VLLM | {"original_lm_head": True}, tensors)
    assert not load_drafter(folder, model).heads.config.own_lm_heads


def test_a_token_map_in_any_order_and_whole_lm_heads(tmp_path, model):
    """vLLM cuts LM heads of the whole vocabulary down to the rows of the map."""
    shuffled = torch.tensor(DRAFT_IDS)[torch.randperm(len(DRAFT_IDS))]
    config = VLLM | {"truncated_vocab_size": len(DRAFT_IDS)}
    tensors = vllm_tensors() | {"token_map": shuffled}
    stored = read(put(tmp_path / "a", config, tensors))
    assert stored.tensors["draft_ids"].tolist() == DRAFT_IDS
    for head in range(HEADS):
        assert torch.equal(stored.tensors["lm_heads"][head], tensors[f"lm_heads.{head}.weight"][DRAFT_IDS])
        cut = tensors[f"lm_heads.{head}.weight"][shuffled]
        tensors[f"lm_heads.{head}.weight"] = cut
    assert_same(read(put(tmp_path / "b", config, tensors)).tensors, stored.tensors)


def test_vllm_heads_without_biases(tmp_path, model):
    stored = read(put(tmp_path / "a", VLLM | {"medusa_fc_bias": False}, vllm_tensors(bias=False)))
    assert not stored.tensors["bias"].any()
    write(tmp_path / "b", stored, "vllm-medusa")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["medusa_fc_bias"] is False
    assert not any(key.endswith(".bias") for key in load_file(tmp_path / "b" / "model.safetensors"))


def test_a_draft_vocabulary_out_of_order_takes_its_lm_head_along(tmp_path, model):
    ordered = eagle3_tensors()
    expected = read(put(tmp_path / "a", EAGLE3, ordered), model)
    order = torch.randperm(len(DRAFT_IDS)).tolist()
    shuffled = [DRAFT_IDS[place] for place in order]
    tensors = ordered | {"lm_head.weight": ordered["lm_head.weight"][order]}
    tensors["d2t"] = torch.tensor([token - place for place, token in enumerate(shuffled)])
    assert_same(read(put(tmp_path / "b", EAGLE3, tensors), model).tensors, expected.tensors)


def test_an_eagle_head_over_the_whole_vocabulary_has_no_maps(tmp_path, model):
    config = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}
    stored = read(put(tmp_path / "a", config, eagle3_tensors(ids=None)), model)
    assert stored.tensors["draft_ids"].tolist() == list(range(VOCAB))
    for to in ("eagle3", "speculators"):
        write(tmp_path / to, stored, to)
        assert not {"d2t", "t2d"} & set(load_file(tmp_path / to / "model.safetensors"))
        assert_same(read(tmp_path / to).tensors, stored.tensors)


def test_an_eagle3_head_may_share_the_lm_head_of_its_target(tmp_path, model):
    """sglang's way: no draft vocabulary declared, no LM head in the file."""
    config = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}
    tensors = {key: value for key, value in eagle3_tensors(ids=None).items() if key != "lm_head.weight"}
    stored = read(put(tmp_path / "a", config, tensors), model)
    assert not stored.config.own_lm_head and stored.config.draft_vocab_size == VOCAB
    assert load_drafter(tmp_path / "a", model).name == "eagle3"
    write(tmp_path / "b", stored, "eagle3", model)
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"], model.lm_head.weight)


def test_the_layers_that_an_eagle3_head_reads(tmp_path, model):
    def features(config, model=model):
        return read(put(tmp_path / "a", EAGLE3 | config, eagle3_tensors()), model).config.features

    assert features({}) == (2, 4, 5)
    assert features({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, None) == (1, 3, 6)
    # sglang names the layers whose outputs these are.
    assert features({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, None) == (1, 3, 6)
    with pytest.raises(CheckpointError, match=r"layers open.*--target"):
        features({}, None)
    with pytest.raises(CheckpointError, match="at least 7 layers, and this one has 4"):
        features({}, tiny_model(num_hidden_layers=4))


def test_what_an_eagle_configuration_says(tmp_path, model):
    scaling = {"type": "linear", "factor": 2.0}
    config = read(put(tmp_path / "a", EAGLE3 | {"rope_scaling": scaling}, eagle3_tensors()), model).config
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0}
    assert (config.version, config.rms_norm_eps, config.head_dim, config.own_embeddings) == (3, 1e-5, HEAD_DIM, False)
    speculators = read(put(tmp_path / "b", SPECULATORS, eagle3_tensors("layers.0."))).config
    assert speculators.norm_before_residual and speculators.features == (1, 4, 6)


def test_a_bias_that_an_eagle_configuration_does_not_mention_is_there(tmp_path, model):
    silent = {key: value for key, value in EAGLE.items() if key != "bias"}
    assert read(put(tmp_path / "a", silent, eagle_tensors(bias=True))).config.fc_bias
    with pytest.raises(CheckpointError, match=rf"'fc.bias' of shape \[{HIDDEN}\] is missing"):
        read(put(tmp_path / "b", silent, eagle_tensors()))
    with pytest.raises(CheckpointError, match=r"unknown tensor 'fc.bias'"):
        read(put(tmp_path / "c", EAGLE, eagle_tensors(bias=True)))


def test_queries_keys_and_values_with_a_bias_of_their_own(tmp_path, model):
    """EAGLE for Qwen2: the output projection has none, which is a bias of zero."""
    tensors = eagle_tensors()
    for name, size in (("q", ATTENTION_HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = noise(size * HEAD_DIM)
    stored = read(put(tmp_path / "a", EAGLE | {"qkv_bias": True, "model_type": "qwen2"}, tensors))
    assert stored.config.attention_bias and not stored.tensors["layer.self_attn.o_proj.bias"].any()
    assert build_heads(stored, model)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_sliding_window_of_speculators_comes_back(tmp_path, kind):
    """Its trainer gives the layer one of 2048 tokens unless told otherwise."""
    window = {"model_type": kind, "layer_types": ["sliding_attention"], "sliding_window": 2048}
    layer = SPECULATORS["transformer_layer_config"] | window | {"use_sliding_window": True}
    tensors = eagle3_tensors("layers.0.")
    if kind == "qwen3":
        tensors |= {f"layers.0.self_attn.{name}_norm.weight": 1 + noise(HEAD_DIM) for name in "qk"}
    stored = read(put(tmp_path / "a", SPECULATORS | {"transformer_layer_config": layer}, tensors))
    assert stored.config.sliding_window == 2048
    assert "sliding_window" in unwritable(stored, "eagle3")
    write(tmp_path / "b", stored, "speculators")
    assert read(tmp_path / "b").config == stored.config
    without = layer | {"layer_types": ["full_attention"]}
    assert (
        read(put(tmp_path / "c", SPECULATORS | {"transformer_layer_config": without}, tensors)).config.sliding_window
        is None
    )


@pytest.mark.parametrize("option", ["fc_norm", "norm_before_fc", "norm_output", "qk_norm"])
def test_options_of_speculators_come_back(tmp_path, model, option):
    config, tensors = dict(SPECULATORS), eagle3_tensors("layers.0.")
    if option == "fc_norm":
        tensors |= {f"fc_norm.{place}.weight": 1 + noise(HIDDEN) for place in range(3)}
    if option == "norm_before_fc":
        tensors["input_norm.weight"] = 1 + noise(3 * HIDDEN)
    if option == "qk_norm":
        tensors |= {f"layers.0.self_attn.{name}_norm.weight": 1 + noise(HEAD_DIM) for name in "qk"}
        config["transformer_layer_config"] = SPECULATORS["transformer_layer_config"] | {"model_type": "qwen3"}
    else:
        config[option] = True
    stored = read(put(tmp_path / "a", config, tensors))
    assert getattr(stored.config, option) and build_heads(stored, model)
    assert "norm_before_residual" in unwritable(stored, "eagle3")
    write(tmp_path / "b", stored, "speculators")
    assert_same(load_file(tmp_path / "b" / "model.safetensors"), tensors)
    assert read(tmp_path / "b").config == stored.config


def test_files_of_other_formats_have_what_their_readers_look_for(tmp_path, model):
    stored = read(CHECKPOINTS["eagle3"][2](tmp_path / "a", model), model)
    write(tmp_path / "eagle3", stored, "eagle3")
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["bias"] is False
    assert config["draft_vocab_size"] == len(DRAFT_IDS) and "target_hidden_size" not in config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert set(load_file(tmp_path / "eagle3" / "model.safetensors")) == set(eagle3_tensors())
    write(tmp_path / "vllm", read(CHECKPOINTS["medusa.pt"][2](tmp_path / "b", model)), "vllm-medusa")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    # vLLM takes any key with "num" and "heads" for the number of heads, and with "num" and "layers" for the blocks.
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"]
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (HEADS, 1, True)
    write(tmp_path / "speculators", stored, "speculators", model)
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    tensors = load_file(tmp_path / "speculators" / "model.safetensors")
    assert set(tensors) == set(eagle3_tensors("layers.0."))
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_shared_lm_heads_are_copied_into_formats_that_cannot_share(tmp_path, model):
    heads = MedusaHeads(MedusaConfig(HIDDEN, VOCAB, HEADS, 1, len(DRAFT_IDS)), torch.tensor(DRAFT_IDS))
    with torch.no_grad():
        heads.weight.normal_()
    save_heads(tmp_path / "a", heads, Fingerprint.of(model), {}, dtype=torch.float32)
    stored = read(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"shares the LM head.*--target"):
        write(tmp_path / "b", stored, "vllm-medusa")
    write(tmp_path / "b", stored, "vllm-medusa", model)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(tensors["lm_heads.0.weight"], model.lm_head.weight[DRAFT_IDS])
    assert "lm_heads.1.weight" not in tensors and tensors["token_map"].tolist() == DRAFT_IDS
    assert_same(build_heads(read(tmp_path / "b"), model).state_dict(), heads.state_dict())
    with pytest.raises(CheckpointError, match="has no medusa heads"):
        write(tmp_path / "c", stored, "eagle3", model)


def test_a_policy_must_suit_the_method(tmp_path, model):
    eagle = CHECKPOINTS["eagle"][2](tmp_path / "a", model)
    medusa = CHECKPOINTS["medusa.pt"][2](tmp_path / "b", model)
    assert load_drafter(eagle, model, tree=DynamicTree(nodes=5)).max_nodes == 5
    assert load_drafter(eagle, model, tree=7).max_nodes == load_drafter(medusa, model, tree=7).max_nodes == 7
    with pytest.raises(ValueError, match="eagle heads grow their trees by DynamicTree, not BestFirst"):
        load_drafter(eagle, model, tree=BestFirst())
    with pytest.raises(ValueError, match="medusa heads grow their trees by BestFirst or StaticTree"):
        load_drafter(medusa, model, tree=DynamicTree())
    assert load_drafter(CHECKPOINTS["hydra"][2](tmp_path / "c", model), model).growth.depth == HEADS


def _drop(key):
    return lambda tensors: tensors.pop(key)


def _set(key, *shape):
    return lambda tensors: tensors.update({key: torch.zeros(shape)})


def _put(key, place, value):
    return lambda tensors: tensors[key].__setitem__(place, value)


# Checkpoint, damage, what is said of it.
DAMAGE = [
    ("medusa.safetensors", _drop("1.0.linear.bias"), rf"'1.0.linear.bias' of shape \[{HIDDEN}\] is missing"),
    ("medusa.safetensors", lambda t: t.update({"1.0.linear.bias": t["1.0.linear.bias"].int()}), "should hold weights"),
    ("eagle3", _drop("lm_head.weight"), "'lm_head.weight' is missing"),
    ("speculators", _drop("lm_head.weight"), "'lm_head.weight' is missing"),
    ("eagle3 of vLLM", _drop("fc.weight"), r"'fc.weight' of shape \[32, 96\] is missing"),
    ("medusa.safetensors", _set("9.weight", 2, 2), r"unknown tensor '9.weight' of shape \[2, 2\]"),
    (
        "medusa.safetensors",
        _set("1.2.weight", VOCAB, 5),
        rf"'1.2.weight' has shape \[{VOCAB}, 5\].*\[{VOCAB}, {HIDDEN}\]",
    ),
    ("medusa.safetensors", _set("0.0.linear.weight", 3), r"'0.0.linear.weight' has shape \[3\].*matrix"),
    ("vllm", _drop("blocks.1.layers.1.weight"), r"'blocks.1.layers.1.weight' of shape \[32, 32\] is missing"),
    ("vllm", _set("lm_heads.7.weight", 1, 1), "unknown tensor 'lm_heads.7.weight'"),
    ("vllm trimmed", _drop("token_map"), rf"'token_map' of shape \[{len(DRAFT_IDS)}\] is missing"),
    ("vllm trimmed", _put("token_map", 0, 97), "'token_map' leads to the id 97, .* 96"),
    ("vllm trimmed", _put("token_map", 0, 5), "'token_map' leads to the id 5 more than once"),
    ("eagle3", _drop("midlayer.hidden_norm.weight"), r"'midlayer.hidden_norm.weight' of shape \[32\] is missing"),
    ("eagle3", _set("midlayer.extra", 1), "unknown tensor 'midlayer.extra'"),
    ("eagle3", _set("fc.weight", HIDDEN, HIDDEN), r"'fc.weight' has shape \[32, 32\].*\[32, 96\]"),
    ("eagle3", _set("lm_head.weight", 4, HIDDEN), "'lm_head.weight' has 4 rows, but .* draft_vocab_size 12"),
    ("eagle3", _drop("d2t"), r"'d2t' of shape \[12\] is missing"),
    ("eagle3", lambda t: t.update(d2t=t["d2t"].float()), "'d2t' is torch.float32, but should hold ids"),
    ("vllm", _set("medusa_heads.lm_heads.0.weight", 1), "'lm_heads.0.weight' is there under two names"),
    ("eagle3", _put("d2t", 0, -1), "'d2t' leads to the id -1"),
    ("eagle3", _put("d2t", 11, VOCAB), rf"'d2t' leads to the id {VOCAB + 11}"),
    ("eagle3", _put("d2t", 1, 2), "'d2t' leads to the id 3 more than once"),
    ("eagle3", _put("t2d", 0, True), "'t2d' marks other ids"),
    (
        "speculators",
        _drop("layers.0.self_attn.k_proj.weight"),
        r"'layers.0.self_attn.k_proj.weight' of shape \[16, 64\]",
    ),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE)
def test_tensors_that_do_not_fit_are_named(tmp_path, model, name, damage, said):
    folder = CHECKPOINTS[name][2](tmp_path / "heads", model)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    damage(tensors)
    save_file({key: value.clone() for key, value in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=said) as caught:
        read(folder, model)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["medusa.safetensors", "vllm", "eagle3", "speculators"])
def test_truncated_weights_are_an_error(tmp_path, model, name):
    folder = CHECKPOINTS[name][2](tmp_path / "heads", model)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))} cannot be read as safetensors"):
        read(folder, model)


class Bomb:
    def __reduce__(self):
        return print, ("boom",)


@pytest.mark.parametrize(("file", "config"), [("medusa_lm_head.pt", MEDUSA), ("pytorch_model.bin", EAGLE)])
def test_a_pickle_that_could_run_code_is_not_opened(tmp_path, capsys, model, file, config):
    folder = put(tmp_path / "a", config, {"0.0.linear.weight": Bomb()}, file)
    with pytest.raises(CheckpointError, match=f"{file} holds more than tensors") as caught:
        read(folder, model)
    assert "safetensors" in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        load_drafter(folder, model)
    assert "boom" not in capsys.readouterr().out
    torch.save([torch.zeros(2)], folder / file)
    with pytest.raises(CheckpointError, match="not a mapping of names to tensors"):
        read(folder, model)
    (folder / file).write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(CheckpointError, match=f"{file} (cannot be read|holds more)"):
        read(folder, model)


TWO_FORMATS = {
    "two files": ("medusa.pt", "hydra"),
    "a file and a configuration": ("speculators", "medusa.pt"),
    "a file and tensors": ("eagle3", "medusa.pt"),
}


@pytest.mark.parametrize("name", TWO_FORMATS)
def test_two_formats_in_one_folder_are_an_error_that_names_both(tmp_path, model, name):
    first, second = TWO_FORMATS[name]
    CHECKPOINTS[second][2](tmp_path / "heads", model)
    folder = CHECKPOINTS[first][2](tmp_path / "heads", model)
    for look in (detect, read, lambda folder: load_drafter(folder, model)):
        with pytest.raises(CheckpointError, match="two formats") as caught:
            look(folder)
        assert all(CHECKPOINTS[part][0] in str(caught.value) for part in (first, second))


def test_a_configuration_of_two_formats_is_an_error(tmp_path):
    put(tmp_path / "a", SPECULATORS | {"format": "treedec"}, {})
    with pytest.raises(CheckpointError, match=r"treedec.*speculators"):
        detect(tmp_path / "a")


CONFIGS = [
    ("speculators", {"speculators_model_type": "dflash"}, "kind 'dflash'"),
    ("speculators", {"transformer_layer_config": LAYER | {"model_type": "mamba"}}, "layer of the kind 'mamba'"),
    ("speculators", {"transformer_layer_config": LAYER | {"hidden_size": "wide"}}, "describes no llama layer"),
    ("speculators", {"norm_before_fc": True, "fc_norm": True}, "exclude each other|is missing"),
    ("eagle3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("eagle3", {"num_key_value_heads": 3}, "3 key-value heads|describes no llama layer"),
    ("eagle3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type must be one of"),
    ("eagle3", {"rope_theta": "much"}, "holds no eagle heads|unsupported operand"),
    ("speculators", {"speculators_config": ["eagle3"]}, "no speculators heads that can be read"),
    ("eagle3", {"vocab_size": 50}, "'d2t' leads to the id 93"),
    ("hydra", {"hydra_head_arch": "cross-attn"}, "'cross-attn'"),
]


@pytest.mark.parametrize(("name", "change", "said"), CONFIGS)
def test_configurations_that_cannot_be_read_are_explained(tmp_path, model, name, change, said):
    folder = CHECKPOINTS[name][2](tmp_path / "heads", model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=said) as caught:
        load_drafter(folder, model)
    assert str(folder) in str(caught.value)


WRONG_TARGETS = [
    ("medusa.pt", {"hidden_size": 64}, "hidden_size 32 but the target has 64"),
    ("medusa.pt", {"vocab_size": 99}, "vocab_size 97 but the target has 99"),
    ("eagle", {"hidden_size": 64}, "hidden_size 32 but the target has 64"),
    ("eagle3", {"vocab_size": 99}, "vocab_size 97 but the target has 99"),
    ("hydra", {"vocab_size": 99}, "vocab_size 97 but the target has 99"),
]


@pytest.mark.parametrize(("name", "changes", "said"), WRONG_TARGETS)
def test_a_target_of_another_shape_is_refused(tmp_path, model, name, changes, said):
    folder = CHECKPOINTS[name][2](tmp_path / "heads", model)
    other = tiny_model(**changes)
    with pytest.raises(CheckpointError, match=said):
        load_drafter(folder, other)
    with pytest.raises(CheckpointError, match=said):
        write(tmp_path / "b", read(folder, model), "treedec", other)


def test_a_fingerprint_given_at_conversion_protects_later(tmp_path, model):
    stored = read(CHECKPOINTS["medusa.pt"][2](tmp_path / "a", model))
    write(tmp_path / "without", stored, "treedec")
    write(tmp_path / "with", stored, "treedec", model)
    other = tiny_model(seed=1)
    assert load_drafter(tmp_path / "without", other).name == "medusa"
    with pytest.raises(CheckpointError, match="another target"):
        load_drafter(tmp_path / "with", other)


def test_a_folder_without_heads(tmp_path, model):
    model.save_pretrained(tmp_path / "model")
    assert detect(tmp_path / "model") is None and detect(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="no heads in a known format"):
        read(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SPECULATORS))
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        read(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read(tmp_path / "model")


def test_heads_in_several_files(tmp_path, model):
    tensors = merged(model)
    folder = tmp_path / "a"
    names = sorted(tensors)
    halves = [names[::2], names[1::2]]
    for place, half in enumerate(halves):
        put(folder, {}, {name: tensors[name] for name in half}, f"model-{place}.safetensors")
    index = {name: f"model-{place}.safetensors" for place, half in enumerate(halves) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert detect(folder) == "medusa" and read(folder).config.heads == HEADS
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no index of weights"):
        read(folder)


def test_methods_are_those_that_drafters_go_by():
    assert set(METHODS) == {"medusa", "hydra", "recurrent", "eagle"}
    assert all(isinstance(method.sequential, bool) for method in METHODS.values())


def test_dtypes_are_kept(tmp_path, model):
    half = {key: value.to(torch.bfloat16) for key, value in medusa_tensors().items()}
    stored = read(put(tmp_path / "a", MEDUSA, half, "medusa_lm_head.pt"))
    for to in ("treedec", "vllm-medusa"):
        write(tmp_path / to, stored, to)
        again = read(tmp_path / to)
        assert {key: value.dtype for key, value in again.tensors.items() if key != "draft_ids"} == {
            key: torch.bfloat16 for key in ("weight", "bias", "lm_heads")
        }
