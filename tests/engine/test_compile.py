"""The compiled pass against its plain twin (slow: inductor takes its time)."""

import functools
from dataclasses import replace

import pytest
import torch
from kit import DECODING, VOCAB, fresh_model, hooks, prompts, ragged_prompts, reference, scripted, tiny_model, uneven

import treedec
from treedec import Draft, Drafter, DraftSession, NgramDrafter, Target, TokenTree, UnsupportedModel
from treedec.growth import DynamicTree
from treedec.heads.attention import LayerCache
from treedec.heads.eagle import EagleConfig, EagleDrafter, EagleHead

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """torch compiles one function a few times only, and then runs it as it is."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_compiled_target_gives_the_same_tokens(name):
    model = tiny_model(name)
    target = Target(model, compile=True)
    for decoding in ("greedy", "T=1.0"):
        arguments = {"max_new_tokens": 30, **DECODING[decoding]}
        expected = reference(model, prompts(), **arguments)
        for drafter in ("last-branch", "right-then-wrong"):
            torch.manual_seed(7)
            ours = treedec.generate(target, prompts(), scripted(expected, drafter), **arguments)
            assert torch.equal(ours, expected.ids), (decoding, drafter)
    ids, mask = ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    if name != "gemma2":  # transformers' own float64 run of a padded gemma 2 ends in NaN
        expected = reference(model, ids, **arguments)
        assert torch.equal(treedec.generate(target, ids, uneven(expected, mask), **arguments), expected.ids)
    assert hooks(model) == []


def test_a_head_path_that_is_not_known_is_refused():
    model = fresh_model()
    original = type(model).forward

    class Shifted(type(model)):
        @functools.wraps(original)
        def forward(self, *args, **kwargs):
            output = original(self, *args, **kwargs)
            output.logits = output.logits + 1
            return output

    model.__class__ = Shifted
    with pytest.raises(UnsupportedModel, match="head path"):
        Target(model, compile=True)


def _in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.neg_()


def _another_tensor(model):
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach())


def _another_type(model):
    model.to(torch.float32)


def _a_buffer(model):
    model.model.rotary_emb.inv_freq *= 0.5


def _a_number(model):
    model.model.layers[0].self_attn.scaling *= 8


def _a_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, arguments, output: -output)


def _another_module(model):
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


@pytest.mark.parametrize(
    "change", [_in_place, _another_tensor, _another_type, _a_buffer, _a_number, _a_hook, _another_module]
)
def test_a_model_that_has_changed_since_is_refused(change):
    """Compiled passes would go on as it was, while the prefill is as it is."""
    model = fresh_model()
    target = Target(model, compile=True)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    before = reference(model, prompts(), **arguments)
    for _ in range(2):
        drafter = scripted(before, "last-branch-then-wrong")
        assert torch.equal(treedec.generate(target, prompts(), drafter, **arguments), before.ids)
    change(model)
    with pytest.raises(RuntimeError, match=r"has changed since.*new Target"):
        treedec.generate(target, prompts(), None, **arguments)
    after = reference(model, prompts(), **arguments)
    assert change is _another_type or not torch.equal(after.ids, before.ids)
    drafter = scripted(after, "last-branch-then-wrong")
    assert torch.equal(treedec.generate(Target(model, compile=True), prompts(), drafter, **arguments), after.ids)


def test_weights_of_a_dtype_without_instructions_are_no_constants(monkeypatch):
    """Nothing packs them; passes read them as they are."""
    monkeypatch.setattr("treedec.compilation.emulated", lambda dtype: True)
    model = fresh_model()
    target = Target(model, compile=True)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    texts = []
    for _ in range(2):
        expected = reference(model, prompts(), **arguments)
        drafter = scripted(expected, "last-branch-then-wrong")
        assert torch.equal(treedec.generate(target, prompts(), drafter, **arguments), expected.ids)
        texts.append(expected.ids.tolist())
        _in_place(model)
    assert texts[0] != texts[1]


def test_an_adapter_that_is_switched_off_is_a_change():
    peft = pytest.importorskip("peft")
    model = fresh_model()
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False), model)
    target = Target(model, compile=True)
    expected = reference(model, prompts(), max_new_tokens=12, do_sample=False)
    drafter = scripted(expected, "last-branch-then-wrong")
    assert torch.equal(treedec.generate(target, prompts(), drafter, max_new_tokens=12, do_sample=False), expected.ids)
    model.model.layers[0].mlp.down_proj.enable_adapters(False)
    with pytest.raises(RuntimeError, match="has changed since"):
        treedec.generate(target, prompts(), None, max_new_tokens=12, do_sample=False)


def test_what_transformers_does_to_a_model_is_no_change():
    model = fresh_model()
    target = Target(model, compile=True)
    model(prompts(), output_hidden_states=True, output_attentions=False)
    model.generate(prompts(), max_new_tokens=4, do_sample=False)
    model.train()
    model.eval()
    expected = reference(model, prompts(), max_new_tokens=12, do_sample=False)
    drafter = scripted(expected, "last-branch-then-wrong")
    assert torch.equal(treedec.generate(target, prompts(), drafter, max_new_tokens=12, do_sample=False), expected.ids)


def test_models_of_one_shape_do_not_share_what_is_compiled():
    """Their weights are constants in it."""
    models = [fresh_model(), fresh_model()]
    with torch.no_grad():
        models[1].model.layers[0].mlp.down_proj.weight.neg_()
    targets = [Target(model, compile=True) for model in models]
    texts = []
    for model, target in [*zip(models, targets, strict=True)] * 2:
        expected = reference(model, prompts(), max_new_tokens=12, do_sample=False)
        drafter = scripted(expected, "last-branch-then-wrong")
        ours = treedec.generate(target, prompts(), drafter, max_new_tokens=12, do_sample=False)
        assert torch.equal(ours, expected.ids)
        texts.append(expected.ids)
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_change_on_the_way_change_in_compiled_passes(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4}
    if kind == "dynamic":
        limits, rope = {"max_position_embeddings": 20}, {**rope, "factor": 4.0}
    else:
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}
        limits, rope = {"max_position_embeddings": 80}, {**rope, **factors, "original_max_position_embeddings": 20}
    model = fresh_model("llama", rope_parameters=rope, **limits)
    expected = reference(model, prompts(length=12), max_new_tokens=30, do_sample=False)
    target = Target(fresh_model("llama", rope_parameters=rope, **limits), compile=True)
    for _ in range(2):  # the second text begins with the frequencies that the first one ended with
        drafter = scripted(expected, "last-branch-then-wrong")
        ours = treedec.generate(target, prompts(length=12), drafter, max_new_tokens=30, do_sample=False)
        assert torch.equal(ours, expected.ids)


class _Cut(Drafter):
    """Drafts trees of four nodes and cuts them to one size after the other, or not."""

    name, max_nodes = "cut", 4

    def start(self, target, batch, capacity):
        return _CutSession()


class _CutSession(DraftSession):
    def __init__(self):
        self.rounds = 0

    def propose(self, state):
        self.rounds += 1
        texts = zip(state.texts, state.room, strict=True)
        rows = [[] if text is None else [text[-1], 3, 4, 5][: 1 + room] for text, room in texts]
        return Draft(TokenTree.chains(rows).cut(2 + self.rounds % 3))


def test_cut_trees_and_dropped_rows_share_the_compilations_of_all_others():
    """What is cut is a view with the strides of the wider trees, and a batch loses rows while it is decoded."""
    model, (ids, mask) = fresh_model(), ragged_prompts((9, 5, 12, 8))
    target = Target(model, compile=True)
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 0, "do_sample": False}
    free = reference(model, ids, **arguments).new
    arguments["eos_token_id"] = [free[0][4], free[1][9], free[2][13]]
    expected = reference(model, ids, **arguments)
    for drafter in (NgramDrafter(min_probability=0), _Cut()):
        out = treedec.generate(target, ids, drafter, **arguments)
        assert torch.equal(out, expected.ids)
        for row in (0, 2):
            treedec.generate(target, ids[row : row + 1], drafter, **arguments | {"attention_mask": mask[row : row + 1]})
    # One row, or several.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_cut_tree_of_one_row_is_no_new_kind_after_trees_that_were_not():
    """A row on its own counts as contiguous whatever its stride, on which the compiler asks for the width of the tree.

    In a benchmark the first such tree was compiled for 90 seconds in the middle of a text.
    """
    model, ids = fresh_model(), prompts(length=9)
    target, arguments = Target(model, compile=True), {"max_new_tokens": 20, "do_sample": False}
    expected = reference(model, ids, **arguments)
    for drafter in (NgramDrafter(min_probability=0), _Cut()):
        assert torch.equal(treedec.generate(target, ids, drafter, **arguments), expected.ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_short_and_a_long_text_share_one_compilation():
    """The cache of a short text must not be as long as its mask, or the compiler takes the two lengths for one."""
    model = tiny_model()
    target = Target(model, compile=True)
    for new in (12, 90):
        expected = reference(model, prompts(), max_new_tokens=new, do_sample=False)
        for drafter in ("last-branch", "adversary"):
            ours = treedec.generate(target, prompts(), scripted(expected, drafter), max_new_tokens=new, do_sample=False)
            assert torch.equal(ours, expected.ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


_EAGLE = EagleConfig(
    hidden_size=32, vocab_size=VOCAB, draft_vocab_size=VOCAB, target_hidden_size=32, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, version=1,
)  # fmt: skip
_EAGLE_3 = replace(_EAGLE, version=3, features=(0, 1, 2), draft_vocab_size=33, own_lm_head=True)


class _Spied(EagleDrafter):
    """Keeps its trees."""

    def start(self, target, batch, capacity):
        session = super().start(target, batch, capacity)
        own = session.propose

        def propose(state):
            draft = own(state)
            self.trees.append((draft.tree.tokens.tolist(), draft.tree.parents.tolist()))
            return draft

        session.propose = propose
        return session


def _eagle(config, model):
    torch.manual_seed(0)
    head = EagleHead(config, torch.arange(0, VOCAB, VOCAB // config.draft_vocab_size)[: config.draft_vocab_size])
    head = head.to(model.dtype).requires_grad_(False)
    drafter = _Spied(head, model, DynamicTree(depth=4, nodes=12, width=3, min_probability=0.0, min_reach=0.0))
    drafter.trees = []
    return drafter


@pytest.mark.parametrize(
    "config",
    [
        _EAGLE,
        replace(_EAGLE_3, own_lm_head=False, sliding_window=6),
        # 64 is also how long the mask is at first, and 2, the number of key-value heads, how many tokens may be read
        # at once.
        replace(_EAGLE_3, own_embeddings=True, head_dim=64),
    ],
    ids=["eagle", "eagle3-shared-window", "eagle3-own"],
)
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_compiled_steps_of_an_eagle_head_draft_the_same_trees(config):
    """One prompt, several of different lengths, again after a change of the head, and of two heads of one shape."""
    model, (ids, mask) = fresh_model(), ragged_prompts()
    plain, compiled = Target(model), Target(model, compile=True)
    drafters = [_eagle(config, model), _eagle(config, model)]
    drafters[1].head.layer.mlp.down_proj.weight.neg_()
    for change in (False, True):
        for drafter in drafters:
            if change:
                drafter.head.layer.self_attn.o_proj.weight.neg_()
            texts = {}
            for target in (plain, compiled):
                drafter.trees.clear()
                single = treedec.generate(target, prompts(), drafter, max_new_tokens=80, do_sample=False)
                batch = treedec.generate(
                    target, ids, drafter, attention_mask=mask, max_new_tokens=8, do_sample=True, seed=3
                )
                texts[target] = single.tolist(), batch.tolist(), list(drafter.trees)
            assert texts[plain] == texts[compiled]
            assert any(len(parents[0]) > 4 for _, parents in drafter.trees)
    assert not torch._dynamo.utils.counters["graph_break"]
    # One row or several: of the target's pass; and of the steps of two heads before and after, from true features or
    # from what was fed back.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * (1 + 2 * 2 * 2)
    assert _trees_of(drafters[0], plain) != _trees_of(drafters[1], plain)


def test_a_head_that_has_changed_is_compiled_anew():
    """In float32 its weights are packed, so that those of before would still be there."""
    model = fresh_model().float()
    drafter, target = _eagle(_EAGLE_3, model), Target(model, compile=True)
    known, drafted = prompts(length=6).split([4, 2], dim=1)
    features = torch.randn(1, 4, 96, generator=torch.Generator().manual_seed(0))
    logits = []
    for change in (False, True):
        if change:
            drafter.head.layer.self_attn.o_proj.weight.neg_()
        for step in (drafter.step, target.compiled(drafter.step)):
            cache = LayerCache(1, 32, 8, target.device)
            read = functools.partial(drafter.step, known, features, cache=cache, known=True)
            states, _ = cache.read([4], 4, lambda here, at, mask, read=read: read(positions=at, mask=mask))
            at = torch.full((1, 2), 4)
            mask = cache.mask(at, torch.eye(2, dtype=torch.bool)[None])
            logits.append(step(drafted, states.repeat(1, 2, 1), at, mask, cache, False)[1])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[2], logits[3], atol=1e-4, rtol=1e-4)
    assert (logits[1] - logits[3]).abs().max() > 0.01


def _trees_of(drafter, target):
    drafter.trees.clear()
    treedec.generate(target, prompts(), drafter, max_new_tokens=16, do_sample=False)
    return list(drafter.trees)
