"""Hydra heads: their trees against a plain reading of every path, and checkpoints of the authors' layout."""

import dataclasses
import json

import pytest
import torch
from kit import DECODING, VOCAB, fresh_model, prompts, ragged_prompts, reference, tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaModel

import treedec
from treedec import Drafting, DraftState
from treedec.growth import DynamicTree
from treedec.heads import hydra
from treedec.heads.formats.hydra import read_hydra
from treedec.heads.hydra import HydraConfig, HydraDrafter, HydraHeads, PrefixConfig

NEW = 30
IDS = torch.arange(1, VOCAB, 2)
PREFIX = PrefixConfig(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def random_heads(model, heads=4, blocks=1, draft_ids=None, own_lm_heads=False, prefix=None, seed=0):
    ids = torch.arange(VOCAB) if draft_ids is None else draft_ids
    module = HydraHeads(HydraConfig(32, VOCAB, heads, blocks, len(ids), own_lm_heads, prefix), ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return module.to(model.dtype)


def plain(heads, model, hidden, path):
    """`[Vd]` logits after a path that begins with the root, one product at a time."""
    w, index = heads.state_dict(), len(path) - 1
    x = torch.cat([hidden, *(model.get_input_embeddings().weight[token] for token in path)])
    for block in range(heads.config.blocks):
        name = f"blocks.{index}.{block}"
        inner = w[f"{name}.linear.weight"] @ x + w[f"{name}.linear.bias"]
        kept = w[f"{name}.residual.weight"] @ x + w[f"{name}.residual.bias"] if block == 0 else x
        x = kept + inner * torch.sigmoid(inner)
    if heads.config.own_lm_heads:
        logits = w[f"lm_heads.{index}.weight"] @ x + w[f"lm_heads.{index}.bias"]
    else:
        logits = model.get_output_embeddings().weight[w["draft_ids"]] @ x
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def state_for(texts, hidden):
    return DraftState(
        texts=texts, hidden=hidden, features=[None] * len(texts), room=[0 if text is None else 9 for text in texts],
        budget=64, drafting=Drafting.TOP, shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("own_lm_heads", [False, True])
@pytest.mark.parametrize(("name", "blocks"), [("llama", 1), ("llama", 3), ("gemma2", 2)])
def test_a_tree_is_that_of_a_plain_reading_of_its_paths(name, blocks, own_lm_heads):
    """The same growth over logits that are computed path by path gives the same tree, and all logits agree."""
    model = tiny_model(name)
    heads = random_heads(model, 4, blocks, IDS, own_lm_heads)
    drafter = HydraDrafter(
        heads, model, DynamicTree(nodes=24, depth=4, width=3, branching=3, min_probability=0.0, min_reach=0.0)
    )
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    session, levels = drafter.start(treedec.Target(model), 3, 64), []
    expand, paths = session.expand, [[], [], []]

    def compared(tokens, parents):
        new = [
            [(*(paths[row][parent] if parent >= 0 else ()), token) for token, parent in zip(*pair, strict=True)]
            for row, pair in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
        ]
        paths[:] = [before + more for before, more in zip(paths, new, strict=True)]
        logits = expand(tokens, parents)
        for row, root in ((0, 5), (2, 2)):
            for node, path in enumerate(new[row]):
                torch.testing.assert_close(
                    logits[row, node], plain(heads, model, hidden[row], [root, *path]), atol=1e-9, rtol=0
                )
        levels.append(len(new[0][0]))
        return logits

    session.expand = compared
    tree = session.propose(state_for([[3, 5], None, [8, 2]], hidden)).tree
    assert tree.counts.tolist() == [24, 0, 24] and levels == [1, 2, 3]
    first = session.begin(state_for([[3, 5], None, [8, 2]], hidden))
    torch.testing.assert_close(first[2], plain(heads, model, hidden[2], [2]), atol=1e-9, rtol=0)


@torch.no_grad()
def test_reading_known_texts_is_what_drafting_does():
    model = tiny_model()
    heads = random_heads(model, 3, 2)
    hidden, tokens = torch.randn(5, 32, dtype=torch.float64), torch.randint(VOCAB, (3, 5))
    outputs = heads(hidden, model.get_input_embeddings().weight[tokens])
    assert outputs.shape == (3, 5, 32)
    for place in range(5):
        for depth in range(3):
            wanted = plain(heads, model, hidden[place], tokens[: depth + 1, place].tolist())
            torch.testing.assert_close(model.lm_head(outputs[depth, place]), wanted, atol=1e-9, rtol=0)


@torch.no_grad()
def test_untrained_heads_repeat_the_prediction_of_the_target():
    model, hidden = tiny_model(), torch.randn(2, 32, dtype=torch.float64)
    heads = HydraHeads(HydraConfig(32, VOCAB, 3, 2, VOCAB)).double()
    outputs = heads(hidden, torch.randn(3, 2, 32, dtype=torch.float64))
    torch.testing.assert_close(outputs, hidden.expand(3, 2, 32))
    session = HydraDrafter(heads, model, DynamicTree(depth=3)).start(treedec.Target(model), 2, 64)
    torch.testing.assert_close(session.begin(state_for([[1], [2]], hidden)), model.lm_head(hidden))


@pytest.mark.parametrize(("own_lm_heads", "prefix"), [(False, None), (True, None), (False, PREFIX)])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0", "top_p"])
def test_random_heads_leave_the_tokens_of_a_ragged_batch_alone(own_lm_heads, prefix, decoding):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    free = reference(model, ids, **arguments)
    heads = random_heads(model, draft_ids=IDS, own_lm_heads=own_lm_heads, prefix=prefix)
    for more in ({}, {"eos_token_id": free.new[1][8], "pad_token_id": 0}):
        expected = reference(model, ids, **arguments, **more)
        drafter = HydraDrafter(heads, model, DynamicTree(depth=4, min_probability=0.0, min_reach=0.0))
        torch.manual_seed(7)
        assert torch.equal(treedec.generate(model, ids, drafter, **arguments, **more), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


def llama_layer():
    """A Llama model of one layer, the reference for the prefix attention, with norms that do not round to float32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=5, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        model = LlamaModel._from_config(config, attn_implementation="sdpa").eval()
        layer = model.layers[0]
        layer.input_layernorm, layer.post_attention_layernorm, model.norm = (nn.RMSNorm(32, eps=1e-6) for _ in range(3))
        for parameter in model.parameters():
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return model.double()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [512, 3])
def test_the_prefix_attention_has_read_the_committed_text_whatever_was_accepted(chunk, monkeypatch):
    """In every round, the scores after the root are those of a Llama layer that reads the whole text anew."""
    model, (ids, mask) = tiny_model(), ragged_prompts()
    reader, heads = llama_layer(), random_heads(model, prefix=PREFIX)
    state = {key.removeprefix("layers.0."): value for key, value in reader.state_dict().items() if "embed" not in key}
    heads.prefix.load_state_dict(state)
    drafter, shown = HydraDrafter(heads, model, DynamicTree(48, 2, 16, 16, 0.0, 0.0)), [[] for _ in ids]
    monkeypatch.setattr(hydra, "_CHUNK", chunk)
    begin, rounds = hydra._HydraSession.begin, []

    def compared(session, state):
        logits = begin(session, state)
        rounds.append(len(logits))
        for row, (text, new) in enumerate(zip(state.texts, state.features, strict=True)):
            if text is not None:
                shown[row].append(new)
                read = reader(inputs_embeds=torch.cat(shown[row])[None]).last_hidden_state[0, -1]
                torch.testing.assert_close(logits[row], plain(heads, model, read, text[-1:]), atol=1e-9, rtol=0)
        return logits

    monkeypatch.setattr(hydra._HydraSession, "begin", compared)
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = reference(model, ids, **arguments)
    arguments |= {"eos_token_id": expected.new[1][20], "pad_token_id": 0}
    out = treedec.generate(model, ids, drafter, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, reference(model, ids, **arguments).ids)
    assert len(rounds) > 9 and len(out.stats.accepted_lengths) > 1  # so drafts were accepted and rejected


@torch.no_grad()
def test_the_prefix_attention_keeps_its_frequencies_in_half_precision():
    heads = random_heads(tiny_model(), prefix=PREFIX)
    assert heads.to(torch.bfloat16).prefix._rotary[0].inv_freq.dtype == torch.float32
    assert not any("rotary" in key for key in heads.state_dict())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="heads must be at least 1"):
        HydraConfig(32, VOCAB, 0, 1, 8)
    with pytest.raises(ValueError, match="own_lm_heads must be true or false"):
        HydraConfig(32, VOCAB, 2, 1, 8, "yes")
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        PrefixConfig(48, 4, 2, 0)
    with pytest.raises(ValueError, match="must divide the attention heads"):
        PrefixConfig(48, 4, 3, 8)
    with pytest.raises(ValueError, match="exceeds the target's 97"):
        HydraConfig(32, VOCAB)
    with pytest.raises(ValueError, match="8 levels deep, but there are only 4 Hydra heads"):
        HydraDrafter(random_heads(tiny_model()), tiny_model(), DynamicTree())
    for own in (False, True):
        with pytest.raises(ValueError, match="belong to another model"):
            HydraDrafter(random_heads(tiny_model(), own_lm_heads=own), fresh_model(vocab_size=64), DynamicTree(depth=2))
    drafter = HydraDrafter(random_heads(tiny_model()), tiny_model(), DynamicTree(depth=2))
    with pytest.raises(ValueError, match="loaded for another model"):
        treedec.generate(fresh_model(vocab_size=64), prompts() % 64, drafter, max_new_tokens=4)


class Original(nn.Module):
    """Modules nested and named as the authors' are; with `prefix`, those of Hydra++."""

    def __init__(self, embeddings, heads, blocks, prefix=None):
        super().__init__()
        size, self.input_embed_fn = embeddings.embedding_dim, embeddings
        if prefix is not None:
            self.prefix_embeding_layer = prefix
        between = [] if prefix is None else [nn.Dropout(0.0)]
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                *between, OriginalBlock(size, head + 1), *[*between, OriginalBlock(size)] * (blocks - 1)
            )  # one block, many times
            for head in range(heads)
        )
        lm_heads = [nn.Linear(size, embeddings.num_embeddings) for _ in range(heads)]
        self.hydra_lm_head = nn.ModuleList(
            lm_heads if prefix is None else [nn.Sequential(nn.Dropout(0.0), lm_head) for lm_head in lm_heads]
        )

    def logits(self, hidden, tokens):
        x = torch.cat([hidden, *(self.input_embed_fn(token) for token in tokens)], dim=-1)
        return self.hydra_lm_head[len(tokens) - 1](self.hydra_mlp[len(tokens) - 1](x))


class OriginalBlock(nn.Module):
    def __init__(self, size, condition=0):
        super().__init__()
        self.linear = nn.Linear(size * (condition + 1), size)
        self.res_connection = nn.Linear(size * (condition + 1), size) if condition else nn.Identity()

    def forward(self, x):
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


def original(model, heads=3, blocks=2, prefix=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Original(model.get_input_embeddings(), heads, blocks, prefix).to(model.dtype)
    return module, {
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": "mlp" if prefix is None else "prefix-mlp",
        "grounded_heads": True,
    }


@torch.no_grad()
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("draft_ids", [None, IDS])
@pytest.mark.parametrize("prefixed", [False, True])
def test_a_checkpoint_of_the_authors_says_what_their_modules_say(tmp_path, blocks, draft_ids, prefixed):
    model, layer = tiny_model(), llama_layer() if prefixed else None
    theirs, config = original(model, 3, blocks, layer)
    torch.save(theirs.state_dict(), tmp_path / "hydra_lm_head.pt")
    tensors = torch.load(tmp_path / "hydra_lm_head.pt", weights_only=True)
    shape, state = read_hydra(config, tensors, draft_ids, model.config)
    ids = torch.arange(VOCAB) if draft_ids is None else draft_ids
    prefix = PREFIX if prefixed else None
    assert shape == HydraConfig(32, VOCAB, 3, blocks, len(ids), own_lm_heads=True, prefix=prefix)
    ours = HydraHeads(shape, state["draft_ids"]).double()
    ours.load_state_dict(state)
    drafter = HydraDrafter(ours, model, DynamicTree(depth=3))
    hidden, tokens = torch.randn(5, 32, dtype=torch.float64), torch.randint(VOCAB, (3, 5))
    read = hidden
    if prefixed:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        read = ours.prefix(hidden[None], torch.arange(5)[None], mask[None, None])[0]
        hidden = layer(inputs_embeds=hidden[None]).last_hidden_state[0]
    for head in range(3):
        inputs = torch.cat([read, *model.get_input_embeddings().weight[tokens[: head + 1]]], dim=-1)
        wanted = theirs.logits(hidden, tokens[: head + 1])[..., ids]
        torch.testing.assert_close(drafter.logits(head, inputs), wanted, atol=1e-9, rtol=0)


def test_the_tensors_are_counted_whatever_the_configuration_says():
    theirs, config = original(tiny_model())
    shape, _ = read_hydra(config | {"hydra_num_heads": 9, "hydra_num_layers": 9}, theirs.state_dict())
    assert (shape.heads, shape.blocks) == (3, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hydra_head_arch": "cross-attn"}, "hydra_head_arch 'cross-attn' cannot be read"),
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch 'eagle-attn' cannot be read"),
        ({"hydra_head_arch": None}, "hydra_head_arch None cannot be read"),
        ({"grounded_heads": False}, "do not see the drafted tokens"),
        ({"hidden_state_offset": 2}, "hidden_state_offset 2"),
    ],
)
def test_kinds_that_cannot_be_read_are_named(config, message):
    theirs, known = original(tiny_model())
    with pytest.raises(ValueError, match=message):
        read_hydra(known | config, theirs.state_dict())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hydra_mlp.1.0.res_connection.bias", None, r"hydra_mlp.1.0.res_connection.bias of \[32\] is missing"),
        ("hydra_mlp.1.1.linear.weight", (32, 64), r"hydra_mlp.1.1.linear.weight of \[32, 32\] has shape \[32, 64\]"),
        ("hydra_mlp.2.2.linear.weight", (32, 32), "hydra_mlp.2.2.linear.weight is not part of 3 Hydra heads"),
        ("hydra_lm_head.1.weight", (VOCAB, 31), r"hydra_lm_head.1.weight of \[97, 32\] has shape \[97, 31\]"),
        ("hydra_lm_head.0.weight", None, "no Hydra heads in it: .* hydra_lm_head.0.weight is missing"),
    ],
)
def test_wrong_tensors_are_named(name, change, message):
    theirs, config = original(tiny_model())
    tensors = theirs.state_dict()
    tensors.pop(name, None)
    if change is not None:
        tensors[name] = torch.zeros(change)
    with pytest.raises(ValueError, match=message):
        read_hydra(config, tensors)


def test_a_prefix_layer_that_cannot_be_read_is_refused():
    model = tiny_model()
    theirs, config = original(model, prefix=llama_layer())
    tensors = theirs.state_dict()
    with pytest.raises(ValueError, match="can be read only with the configuration of their target"):
        read_hydra(config, tensors)
    scaled = LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="embeddings of type 'linear'"):
        read_hydra(config, tensors, base=scaled)
    tensors.pop("prefix_embeding_layer.norm.weight")
    with pytest.raises(ValueError, match=r"prefix_embeding_layer.norm.weight of \[32\] is missing"):
        read_hydra(config, tensors, base=model.config)


@pytest.mark.parametrize("prefix", [None, PREFIX])
def test_a_shape_survives_json(prefix):
    shape = HydraConfig(32, VOCAB, 2, 1, 50, True, prefix)
    assert HydraConfig(**json.loads(json.dumps(dataclasses.asdict(shape)))) == shape
