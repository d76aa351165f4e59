"""EAGLE heads compute what the papers say, at every node of every tree of a ragged generation."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from kit import DECODING, VOCAB, fresh_model, ragged_prompts, reference, tiny_model
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaModel

import treedec
from treedec import Target
from treedec.drafter import Drafting, DraftState
from treedec.growth import DynamicTree
from treedec.heads.attention import LayerCache
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead

H, NEW = 32, 30
EAGLE_1 = EagleConfig(
    hidden_size=H, vocab_size=VOCAB, draft_vocab_size=VOCAB, target_hidden_size=H, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, version=1, fc_bias=True,
)  # fmt: skip
EAGLE_3 = replace(EAGLE_1, version=3, features=(0, 1, 2), draft_vocab_size=33, fc_bias=False, own_lm_head=True)
CONFIGS = {
    "eagle": EAGLE_1,
    "eagle-trimmed": replace(EAGLE_1, draft_vocab_size=48, fc_bias=False, attention_bias=True, num_key_value_heads=4),
    "eagle3": EAGLE_3,
    "eagle3-residual-normed": replace(EAGLE_3, norm_before_residual=True, num_key_value_heads=1),
    "eagle3-untrimmed": replace(EAGLE_3, draft_vocab_size=VOCAB, own_lm_head=False, features=(1,), qk_norm=True),
    "eagle3-window": replace(EAGLE_3, sliding_window=5),
    "eagle3.1": replace(EAGLE_3, fc_norm=True, norm_output=True),
    "eagle3-narrow": replace(
        EAGLE_3, hidden_size=20, own_embeddings=True, norm_before_fc=True, fc_bias=True, rms_norm_eps=1e-5
    ),
}


def eagle_head(config, seed=0):
    """A head with random weights, none of them 0 or 1, in float64."""
    ids = torch.arange(config.draft_vocab_size) * (VOCAB // config.draft_vocab_size)
    head = EagleHead(config, ids).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return head


def eagle_drafter(name, model=None, **tree):
    growth = DynamicTree(
        **{"nodes": 12, "depth": 4, "width": 3, "branching": 3, "min_probability": 0.0, "min_reach": 0.0, **tree}
    )
    return EagleDrafter(eagle_head(CONFIGS[name]), model or tiny_model(), growth)


# The reference: one row, no cache, everything computed anew for every path, position by position.


def rms_norm(x, weight, eps):
    return weight * x / (x.square().mean() + eps).sqrt()


def rotated(x, position, base):
    # Frequencies and angles are float32 in every implementation.
    angles = position / base ** (torch.arange(0, len(x), 2).float() / len(x))
    cos, sin = angles.cos().double(), angles.sin().double()
    low, high = x.chunk(2)
    return torch.cat([low * cos - high * sin, high * cos + low * sin])


def reference_layer(w, c, embeddings, features):
    """`[n, H]` embeddings and features to `[n, H]` outputs (arXiv:2401.15077, section 3.1; 2503.01840, section 3.1)."""

    def linear(name, x):
        out = w[f"{name}.weight"] @ x
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    d, group = c.head_dim, c.num_attention_heads // c.num_key_value_heads
    starts, queries, keys, values, outputs = [], [], [], [], []
    for t, (e, g) in enumerate(zip(embeddings, features, strict=True)):
        if c.version == 1:
            x = start = linear("fc", torch.cat([e, g]))
        else:
            normed = rms_norm(g, w["layer.hidden_norm.weight"], c.rms_norm_eps)
            x = torch.cat([rms_norm(e, w["layer.input_layernorm.weight"], c.rms_norm_eps), normed])
            start = normed if c.norm_before_residual else g
        starts.append(start)
        q, k, v = (linear(f"layer.self_attn.{part}_proj", x).reshape(-1, d) for part in "qkv")
        if c.qk_norm:
            q = torch.stack([rms_norm(part, w["layer.self_attn.q_norm.weight"], c.rms_norm_eps) for part in q])
            k = torch.stack([rms_norm(part, w["layer.self_attn.k_norm.weight"], c.rms_norm_eps) for part in k])
        queries.append([rotated(part, t, c.rope_parameters["rope_theta"]) for part in q])
        keys.append([rotated(part, t, c.rope_parameters["rope_theta"]) for part in k])
        values.append(v)
        read = []
        seen = range(0 if c.sliding_window is None else max(0, t + 1 - c.sliding_window), t + 1)
        for head in range(c.num_attention_heads):
            scores = torch.stack([queries[t][head] @ keys[s][head // group] for s in seen]) / math.sqrt(d)
            read.append(sum(p * values[s][head // group] for s, p in zip(seen, scores.softmax(0), strict=True)))
        x = starts[t] + linear("layer.self_attn.o_proj", torch.cat(read))
        y = rms_norm(x, w["layer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gated = F.silu(linear("layer.mlp.gate_proj", y)) * linear("layer.mlp.up_proj", y)
        outputs.append(x + linear("layer.mlp.down_proj", gated))
    return outputs


def reference_logits(head, model, text, features, path):
    """`[Vd]` logits of what follows text + path; `features [len(text) − 1, F]` are those of the target."""
    w, c = head.state_dict(), head.config
    table = w["embed_tokens.weight"] if c.own_embeddings else model.get_input_embeddings().weight
    known = []
    for feature in features:
        if c.version == 3:
            if c.norm_before_fc:
                feature = rms_norm(feature, w["fc_norm.weight"], c.rms_norm_eps)
            if c.fc_norm:
                weights = w["fc_norm.weight"].split(c.target_hidden_size)
                parts = zip(feature.split(c.target_hidden_size), weights, strict=True)
                feature = torch.cat([rms_norm(part, weight, c.rms_norm_eps) for part, weight in parts])
            feature = w["fc.weight"] @ feature + (w["fc.bias"] if c.fc_bias else 0)
        known.append(feature)
    for depth in range(len(path) + 1):
        tokens = [*text, *path[:depth]]
        last = reference_layer(w, c, table[torch.tensor(tokens[1:])], known)[-1]
        normed = rms_norm(last, w["norm.weight"], c.rms_norm_eps) if c.version == 3 else last
        known.append(normed if c.norm_output else last)
    if c.own_lm_head:
        return w["lm_head.weight"] @ normed
    full = model.get_output_embeddings()(normed)
    full = full / getattr(model.config, "logits_scaling", 1)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return (full if cap is None else cap * (full / cap).tanh())[head.draft_ids]


def state_of(texts, features):
    return DraftState(
        texts=texts, hidden=None, features=features, room=[9] * len(texts), budget=64, drafting=Drafting.TOP,
        shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip


class Rows:
    """Made-up texts and features of three rows that advance by `commits` tokens each; None finishes a row."""

    def __init__(self, config, seed=3):
        self.generator = torch.Generator().manual_seed(seed)
        self.texts = [self.tokens(length) for length in (6, 1, 4)]
        self.features = [torch.zeros(0, config.feature_size, dtype=torch.float64)] * 3

    def tokens(self, count):
        return torch.randint(VOCAB, (count,), generator=self.generator).tolist()

    def state(self, commits):
        new = []
        for row, count in enumerate(commits):
            if count is None:
                self.texts[row] = None
                new.append(None)
                continue
            self.texts[row] = self.texts[row] + self.tokens(count)
            missing = len(self.texts[row]) - 1 - len(self.features[row])
            new.append(torch.randn(missing, self.features[row].shape[1], generator=self.generator, dtype=torch.float64))
            self.features[row] = torch.cat([self.features[row], new[-1]])
        return state_of(list(self.texts), new)


# Places of parents, level by level; nodes of a level have different parents in different rows.
LEVELS = (
    [[-1, -1, -1], [-1, -1, -1], [-1, -1, -1]],
    [[0, 0, 2], [1, 2, 0], [2, 2, 2]],
    [[5, 3], [3, 4], [4, 5]],
    [[6], [7], [7]],
)
ROUNDS = ([1, 1, 1], [1, 5, 2], [4, 1, None], [1, 1, None], [2, 3, None])


def expand_tree(session, rows, levels, check):
    """Expand nodes with tokens drawn at random; `check(row, path, logits)` each of them in unfinished rows."""
    paths = [[] for _ in rows.texts]
    for parents in levels:
        tokens = torch.tensor([rows.tokens(len(level)) for level in parents])
        logits = session.expand(tokens, torch.tensor(parents))
        assert bool(logits.isfinite().all())
        for row, level in enumerate(parents):
            above = [[] if parent < 0 else paths[row][parent] for parent in level]
            new = [[*path, token] for path, token in zip(above, tokens[row].tolist(), strict=True)]
            paths[row] += new
            for node, path in enumerate(new if rows.texts[row] is not None else []):
                check(row, path, logits[row, node])


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_at_every_node_equal_those_computed_anew_from_the_equations(name):
    model, drafter = tiny_model(), eagle_drafter(name)
    rows = Rows(drafter.head.config)
    session = drafter.start(Target(model), 3, 64)

    def check(row, path, logits):
        wanted = reference_logits(drafter.head, model, rows.texts[row], rows.features[row], path)
        torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=0)

    for number, commits in enumerate(ROUNDS):
        logits = session.begin(rows.state(commits))
        for row, text in enumerate(rows.texts):
            if text is not None:
                check(row, [], logits[row])
        expand_tree(session, rows, LEVELS if number in (1, 4) else LEVELS[:1], check)


@pytest.mark.parametrize("name", ["gemma2", "granite", "gptj"])
@torch.no_grad()
def test_the_head_of_the_target_is_used_as_the_target_does(name):
    """Scaled, soft-capped or with a bias; its embeddings are not scaled for the head (gemma)."""
    model = fresh_model(name)
    if model.lm_head.bias is not None:
        model.lm_head.bias.normal_(generator=torch.Generator().manual_seed(0))
    rows = Rows(EAGLE_1)
    drafter = eagle_drafter("eagle-trimmed", model)
    logits = drafter.start(Target(model), 3, 64).begin(rows.state([1, 2, 3]))
    for row, text in enumerate(rows.texts):
        wanted = reference_logits(drafter.head, model, text, rows.features[row], [])
        torch.testing.assert_close(logits[row], wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("chunk", [512, 2])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@torch.no_grad()
def test_what_a_session_keeps_is_what_a_fresh_one_reads(name, chunk):
    """Also in chunks, and in a cache as small as can be."""
    drafter = eagle_drafter(name)
    rows = Rows(drafter.head.config)
    session = drafter.start(Target(tiny_model()), 3, 12)
    session._cache = LayerCache(3, 12, drafter.growth.expanded, torch.device("cpu"), chunk)
    for commits in [*ROUNDS[:2], [3, 1, 1], [1, 1, 4]]:
        ours = session.begin(rows.state(commits))
        expand_tree(session, rows, LEVELS, lambda *_: None)
    assert max(len(text) for text in rows.texts) == 12
    fresh = drafter.start(Target(tiny_model()), 3, 12)
    torch.testing.assert_close(fresh.begin(state_of(rows.texts, rows.features)), ours, atol=1e-9, rtol=0)
    for row, text in enumerate(rows.texts):
        assert session._cache.lengths[row] == len(text) - 1
        for kept, read in zip(session._cache.visible_states(0, row), fresh._cache.visible_states(0, row), strict=True):
            torch.testing.assert_close(kept, read, atol=1e-9, rtol=0)


@torch.no_grad()
def test_the_layer_is_that_of_llama_with_every_kind_of_rotary_embedding():
    """Held against transformers' own layer, but for the norm before attention that EAGLE-1 does without."""
    llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ropes = [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {**llama3, "rope_theta": 500.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ]
    embedded, features = torch.randn(2, 1, 9, H, generator=torch.Generator().manual_seed(0))
    causal, outputs = torch.ones(9, 9, dtype=torch.bool).tril()[None, None], []
    for rope in ropes:
        config = replace(EAGLE_1, rope_parameters=rope, attention_bias=True)
        # Frequencies must survive low precision, in which heads are kept and loaded.
        head = eagle_head(config).to(torch.bfloat16).float()
        llama = LlamaModel(
            LlamaConfig(
                vocab_size=VOCAB, hidden_size=H, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, rope_parameters=rope, attention_bias=True,
            )
        )  # fmt: skip
        llama.layers[0].input_layernorm = torch.nn.Identity()
        llama.norm = torch.nn.Identity()
        llama.layers[0].load_state_dict(head.layer.state_dict())
        outputs.append(head(embedded, features, torch.arange(9)[None], causal))
        fused = head.fc(torch.cat([embedded, features], -1))
        wanted = llama(inputs_embeds=fused, use_cache=False).last_hidden_state
        torch.testing.assert_close(outputs[-1], wanted, atol=1e-5, rtol=1e-5)
    assert all((one - outputs[0]).abs().max() > 1e-3 for one in outputs[1:])


@pytest.mark.parametrize("config", [EAGLE_1, EAGLE_3])
@torch.no_grad()
def test_two_steps_at_all_positions_at_once_as_in_training(config):
    """Training feeds outputs back over whole texts (EAGLE-3's training-time test), with a cache of transformers."""
    head, cache = eagle_head(config), DynamicCache()
    embedded, features = torch.randn(2, 1, 6, H, generator=torch.Generator().manual_seed(0)).double()
    causal, places = torch.ones(5, 5, dtype=torch.bool).tril(), torch.arange(5)[None]
    first = head(embedded[:, :5], features[:, :5], places, causal[None, None], cache)
    torch.testing.assert_close(first, head(embedded[:, :5], features[:, :5], places, causal[None, None]))
    # The pair drafted at t sees the true ones before it, and itself.
    mask = torch.cat([causal, torch.eye(5, dtype=torch.bool)], dim=1)[None, None]
    second = head(embedded[:, 1:], first, 1 + places, mask, cache)
    for t in range(5):
        known = [*features[0, : t + 1], first[0, t]]
        wanted = reference_layer(head.state_dict(), config, embedded[0, : t + 2], known)
        torch.testing.assert_close(first[0, t], wanted[-2], atol=1e-9, rtol=0)
        torch.testing.assert_close(second[0, t], wanted[-1], atol=1e-9, rtol=0)


class Guided(EagleDrafter):
    """Drafts what the reference found, wrong now and then, from a head whose own logits are checked on the way."""

    def __init__(self, head, model, growth, expected, lengths):
        super().__init__(head, model, growth)
        self.model, self.checked = model, 0
        self.full = [[*row[-length - NEW : -NEW], *row[-NEW:]] for row, length in zip(expected, lengths, strict=True)]
        self.prompts = lengths

    def start(self, target, batch, capacity):
        session = super().start(target, batch, capacity)
        begin, expand = session.begin, session.expand

        def checked_begin(state):
            logits, self.texts, self.paths = begin(state), state.texts, [[] for _ in state.texts]
            for row, text in enumerate(state.texts):
                if text is not None and len(text) % 5 == 0:
                    features = target_features(self.model, text[:-1], self.features)
                    wanted = reference_logits(self.head, self.model, text, features, [])
                    torch.testing.assert_close(logits[row], wanted, atol=1e-9, rtol=0)
                    self.checked += 1
            return torch.stack([self.guided(row, [], scores) for row, scores in enumerate(logits)])

        def guided_expand(tokens, parents):
            logits = expand(tokens, parents)
            for row, (new, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
                known = list(self.paths[row])
                self.paths[row] += [[*(known[p] if p >= 0 else []), t] for t, p in zip(new, above, strict=True)]
            new = tokens.shape[1]
            return torch.stack(
                [
                    torch.stack([self.guided(row, path, logits[row, i]) for i, path in enumerate(paths[-new:])])
                    for row, paths in enumerate(self.paths)
                ]
            )

        session.begin, session.expand = checked_begin, guided_expand
        return session

    def guided(self, row, path, logits):
        text = [*self.texts[row], *path] if self.texts[row] else []
        if text != self.full[row][: len(text)] or not self.prompts[row] <= len(text) < len(self.full[row]):
            return logits
        right = self.full[row][len(text)]
        if len(text) % (row + 3) == 0:
            right = (right + 1) % VOCAB
        return logits + 60 * (self.head.draft_ids == right)


def target_features(model, text, layers):
    head_input = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: head_input.append(given[0]))
    out = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    hook.remove()
    return torch.cat([out.hidden_states[layer][0] for layer in layers], -1) if layers else head_input[0][0]


@pytest.mark.parametrize("decoding", ["greedy", "T=1.0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_ragged_batch_decodes_as_without_drafts(name, decoding):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    plain = eagle_drafter(name)
    guided = Guided(plain.head, model, plain.growth, expected.ids.tolist(), mask.sum(1).tolist())
    for drafter in (plain, guided):
        torch.manual_seed(7)
        out = treedec.generate(model, ids, drafter, return_dict_in_generate=True, **arguments)
        assert torch.equal(out.sequences, expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)
    assert guided.checked > 3
    lengths = set(out.stats.accepted_lengths)
    assert len(lengths) > 1 and max(lengths) > 2


@pytest.mark.parametrize("name", ["eagle", "eagle3-untrimmed"])
def test_an_eos_ends_each_row_where_it_would_without_drafts(name):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    free = reference(model, ids, **arguments)
    arguments |= {"eos_token_id": free.new[1][9], "pad_token_id": 0}
    expected = reference(model, ids, **arguments)
    plain = eagle_drafter(name)
    guided = Guided(plain.head, model, plain.growth, free.ids.tolist(), mask.sum(1).tolist())
    for drafter in (plain, guided):
        assert torch.equal(treedec.generate(model, ids, drafter, **arguments), expected.ids)


def test_sampling_by_rejection_and_a_prompt_of_one_token():
    arguments = {"max_new_tokens": 12, "do_sample": True}
    for name in ("eagle", "eagle3"):
        for rule in ("residual", "traversal"):
            drafter = eagle_drafter(name)
            out = treedec.generate(tiny_model(), torch.tensor([[5]]), drafter, acceptance=rule, **arguments)
            assert out.shape == (1, 13)


def test_a_target_of_half_precision_and_a_head_likewise():
    model = fresh_model(dtype=torch.bfloat16)
    head = eagle_head(EAGLE_3).bfloat16()
    out = treedec.generate(
        model, torch.tensor([[5, 6, 7]]), EagleDrafter(head, model, DynamicTree()), max_new_tokens=12
    )
    assert out.shape == (1, 15)


def test_names_shapes_and_what_a_drafter_says_of_itself():
    one, three = eagle_drafter("eagle-trimmed"), eagle_drafter("eagle3.1")
    assert (one.name, one.features, one.max_nodes) == ("eagle", (), 12)
    assert (three.name, three.features) == ("eagle3", (0, 1, 2))
    assert {name: tuple(value.shape) for name, value in one.head.state_dict().items()} == {
        "draft_ids": (48,),
        "fc.weight": (32, 64),
        **{f"layer.self_attn.{part}_proj.weight": (32, 32) for part in "qkvo"},
        **{f"layer.self_attn.{part}_proj.bias": (32,) for part in "qkvo"},
        **{f"layer.mlp.{part}_proj.weight": (48, 32) for part in ("gate", "up")},
        "layer.mlp.down_proj.weight": (32, 48),
        "layer.post_attention_layernorm.weight": (32,),
    }
    assert {name: tuple(value.shape) for name, value in three.head.state_dict().items()} == {
        "draft_ids": (33,),
        "fc.weight": (32, 96),
        "fc_norm.weight": (96,),
        "layer.self_attn.q_proj.weight": (32, 64),
        **{f"layer.self_attn.{part}_proj.weight": (16, 64) for part in "kv"},
        "layer.self_attn.o_proj.weight": (32, 32),
        **{f"layer.mlp.{part}_proj.weight": (48, 32) for part in ("gate", "up")},
        "layer.mlp.down_proj.weight": (32, 48),
        **{f"layer.{part}.weight": (32,) for part in ("post_attention_layernorm", "input_layernorm", "hidden_norm")},
        "norm.weight": (32,),
        "lm_head.weight": (33, 32),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_survives_json(name):
    assert EagleConfig(**json.loads(json.dumps(asdict(CONFIGS[name])))) == CONFIGS[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 0}, "head_dim must be an integer of at least 1, not 0"),
        ({"hidden_size": 32.0}, "hidden_size must be an integer of at least 1, not 32.0"),
        ({"fc_bias": "no"}, "fc_bias must be true or false, not 'no'"),
        ({"head_dim": 7}, "head_dim must be even to be rotated, not 7"),
        ({"draft_vocab_size": 98}, "98 tokens exceeds the target's 97"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"version": 2}, "version must be 1 .* or 3 .*, not 2"),
        ({"features": ()}, "features must name at least one layer"),
        ({"features": (-1, 2)}, r"from 0: \(-1, 2\)"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"version": 1}, "own_lm_head: only a head of version 3 has that"),
        ({"version": 1, "own_lm_head": False}, r"not layers \(0, 1, 2\)"),
        ({"version": 1, "own_lm_head": False, "features": (), "hidden_size": 16}, "hidden_size of 16 must be .* of 32"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "not 'dynamic'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
    ],
)
def test_a_configuration_says_what_is_wrong_with_it(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(EAGLE_3, **changes)


def test_draft_ids_must_be_ascending_ids_of_the_target():
    for ids in ([0, 1], [0, 2, 1], [1, 1, 2], [-1, 0, 1], [0, 1, 97]):
        with pytest.raises(ValueError, match="draft_ids must be 3 ascending ids below 97"):
            EagleHead(replace(EAGLE_1, draft_vocab_size=3), torch.tensor(ids))


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (EAGLE_3, {"vocab_size": 64}, r"vocabulary of 97 tokens, but LlamaForCausalLM's LM head .* \(64, 32\)"),
        (EAGLE_1, {"hidden_size": 64}, r"an LM head of shape \(97, 32\), but LlamaForCausalLM's is \(97, 64\)"),
        (EAGLE_3, {"hidden_size": 64}, r"embeddings of shape \(97, 32\), but LlamaForCausalLM's are \(97, 64\)"),
        (CONFIGS["eagle3-narrow"], {"hidden_size": 64}, "states of width 32, but LlamaForCausalLM's have 64"),
        (
            EAGLE_3,
            {"num_hidden_layers": 1},
            r"states \(0, 1, 2\), but LlamaForCausalLM has only those from 0 to 1",
        ),
    ],
)
def test_heads_that_do_not_fit_the_model_are_refused(config, model, message):
    with pytest.raises(ValueError, match=message):
        EagleDrafter(eagle_head(config), fresh_model(**model), DynamicTree())
    with pytest.raises(ValueError, match=message):
        EagleDrafter(eagle_head(config), tiny_model(), DynamicTree()).start(Target(fresh_model(**model)), 1, 32)


def test_a_state_without_the_features_is_refused():
    session = eagle_drafter("eagle").start(Target(tiny_model()), 1, 32)
    with pytest.raises(ValueError, match=r"row 0: .* features of the last 2 known tokens, \[2, 32\], not None"):
        session.begin(state_of([[1, 2, 3]], [None]))
    with pytest.raises(ValueError, match=r"\[2, 32\], not \[1, 32\]"):
        session.begin(state_of([[1, 2, 3]], [torch.zeros(1, 32)]))
