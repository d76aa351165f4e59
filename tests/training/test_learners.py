"""Every method learns what it will draft: its own offset and nothing else; the target stays what it was (A21, A22)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from batches import batch_of
from kit import VOCAB, fresh_model, prompts, reference, tiny_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import treedec
from treedec.growth import BestFirst, DynamicTree
from treedec.training.learners import LEARNERS
from treedec.training.learners.eagle import Eagle3Options, EagleOptions
from treedec.training.learners.heads import HydraOptions, MedusaOptions, RecurrentOptions
from treedec.training.losses import draft_logits

DEPTHS = 3
OPTIONS = {
    "medusa": ("medusa", MedusaOptions(heads=DEPTHS)),
    "medusa-deep": ("medusa", MedusaOptions(heads=DEPTHS, blocks=2)),
    "hydra": ("hydra", HydraOptions(heads=DEPTHS)),
    "hydra-deep": ("hydra", HydraOptions(heads=DEPTHS, blocks=2)),
    "hydra-prefix": ("hydra", HydraOptions(heads=DEPTHS, prefix=True)),
    "recurrent": ("recurrent", RecurrentOptions(depths=DEPTHS)),
    "recurrent-narrow": ("recurrent", RecurrentOptions(depths=DEPTHS, state_size=16, inner_size=24, layers=())),
    "eagle": ("eagle", EagleOptions(regression=0.3)),
    "eagle-unrolled": ("eagle", EagleOptions(depths=DEPTHS, noise=0.0, regression=0.3, intermediate_size=48)),
    "eagle3": ("eagle3", Eagle3Options(depths=DEPTHS)),
    "eagle3-normed": ("eagle3", Eagle3Options(depths=DEPTHS, norm_before_residual=True, fc_norm=True, layers=(1,))),
}
METHODS = sorted({method for method, _ in OPTIONS.values()})
#: One for each way to unroll.
KINDS = ("medusa", "hydra", "hydra-prefix", "recurrent", "eagle", "eagle-unrolled", "eagle3")
EVERY = torch.arange(VOCAB)
TRIMMED = torch.arange(0, VOCAB, 2)
LENGTHS = (14, 9, 11, 17)
RESPONSES = ([(3, 7), (9, 14)], [(0, 6)], [], [(2, 12)])


def build(name, model, draft_ids=EVERY, labels="soft"):
    method, options = OPTIONS[name]
    return LEARNERS[method].build(model, options, draft_ids, labels=labels)


def generic(learner, seed=0):
    """No weight is 0 or 1, so that nothing drops out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.parameters():
            drawn = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn + (parameter.dim() == 1))
    return learner


def random_batch(model, layers, responses=RESPONSES, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return batch_of(model, texts, responses, layers)


def total(losses):
    return losses.sums.sum() + (0 if losses.extra is None else losses.extra)


# Offsets: a target that counts, and texts that go up by one or, as no text of the target would, by two.

CIRCLE, WIDTH = 13, 16


@cache
def counting_model():
    """Continues `x` with `x + 1`: one-hot embeddings pass untouched to a shifted LM head."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    nothing = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=CIRCLE, **shape, **nothing, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(CIRCLE, WIDTH))
        model.lm_head.weight.copy_(torch.eye(CIRCLE, WIDTH).roll(1, 0))
    return model


@cache
def trained(name, step, labels="soft"):
    """A learner after some steps on its one batch."""
    model = counting_model()
    learner = build(name, model, torch.arange(CIRCLE), labels)
    texts = [[(start + step * i) % CIRCLE for i in range(10)] for start in range(CIRCLE)]
    batch = batch_of(model, texts, [[(2, 10)]] * CIRCLE, learner.layers)
    optimiser = torch.optim.AdamW(learner.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        total(learner(batch)).backward()
        optimiser.step()
    return learner.eval(), batch


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("step", "labels"), [(1, "soft"), (2, "soft"), (2, "hard")])
def test_every_depth_learns_its_own_offset(name, step, labels):
    """After `x` the target says `x + 1`, so that depth d drafts `x + 2 + d` if texts do as it says.

    In texts that go by two, the root and the tokens after it are `x + 2`, `x + 4`, …, and the target would follow them
    with `x + 3 + 2 d`, while the text itself goes on with `x + 4 + 2 d`: no other position, no other label would do.
    """
    learner, batch = trained(name, step, labels)
    rows = learner.rows(batch)
    at = batch.input_ids.flatten()[rows]
    for depth, states in enumerate(learner.unroll(batch, rows)):
        best = draft_logits(states, learner._frozen.head).argmax(-1)
        wanted = {(1, "soft"): at + 2 + depth, (2, "soft"): at + 3 + 2 * depth, (2, "hard"): at + 4 + 2 * depth}
        taught = batch.supervised(1 + depth).flatten()[rows]
        assert torch.equal(best[taught], wanted[step, labels][taught] % CIRCLE)
    losses = learner(batch)
    assert losses.counts.tolist() == [CIRCLE * (8 - 1 - depth) for depth in range(learner.depths)]
    assert losses.hits.tolist() == ([0] * learner.depths if labels == "hard" else losses.counts.tolist())
    ranks = learner.ranks(batch, 2)
    for depth in range(learner.depths):
        right = batch.supervised(1 + depth) & (step == 1 or labels == "hard")
        assert torch.equal(ranks[depth] == 0, right) and not ranks.requires_grad


@pytest.mark.filterwarnings("ignore:what a token sees hardly moves")  # true of a target that only counts
@pytest.mark.parametrize("name", KINDS)
def test_what_was_learned_is_drafted(name, tmp_path):
    """Saved, loaded and let loose, trained heads are right about all they were trained to guess."""
    model = counting_model()
    learner, _ = trained(name, 1)
    learner.save(tmp_path / "heads", {})
    tree = BestFirst(nodes=1 + DEPTHS, branching=1)
    if name != "medusa":
        tree = DynamicTree(
            nodes=1 + learner.depths, depth=learner.depths, width=1, branching=1, min_probability=0.0, min_reach=0.0
        )
    drafter = treedec.load_drafter(tmp_path / "heads", model, tree=tree)
    ids = torch.tensor([[5, 6, 7], [10, 11, 12]])
    out = treedec.generate(
        model, ids, drafter, max_new_tokens=1 + 2 * (1 + learner.depths), do_sample=False, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == [(5 + i) % CIRCLE for i in range(out.sequences.shape[1])]
    assert out.stats.accepted_lengths == {1 + learner.depths: 4}


# What is supervised, and what gradients reach.


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_is_trained(name, labels):
    model = tiny_model()
    learner = generic(build(name, model, TRIMMED, labels))
    losses = learner(random_batch(model, learner.layers))
    losses.sums.sum().backward()
    names = [key for key, _ in learner.named_parameters()]
    assert names and all(parameter.requires_grad for parameter in learner.parameters())
    for key, parameter in learner.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), key
    for depth in range(learner.depths):  # each depth by itself is trained, too
        gradients = torch.autograd.grad(
            learner(random_batch(model, learner.layers)).sums[depth], list(learner.parameters()), allow_unused=True
        )
        assert any(one is not None and one.any() for one in gradients)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_fresh_learner_can_learn(name):
    """Also from where training starts, where some heads hold zeros."""
    learner = build(name, tiny_model())
    batch = random_batch(tiny_model(), learner.layers)
    before = learner(batch).sums.sum().item()
    optimiser = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    for _ in range(8):
        optimiser.zero_grad()
        total(learner(batch)).backward()
        optimiser.step()
    assert learner(batch).sums.sum().item() < 0.97 * before


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_boundary_is_supervised_and_other_turns_are_not(name):
    model = tiny_model()
    learner = build(name, model)
    batch = random_batch(model, learner.layers)
    width = batch.input_ids.shape[1]
    expected = {(0, 2), (0, 8), (1, 0), (3, 1)}  # one before each response, but for the text that begins with one
    positions = {divmod(row, width) for row in learner.rows(batch).tolist()}
    others = {(0, 1), (0, 6), (0, 7), (0, 12), (1, 5), (2, 3), (3, 0), (3, 10)}
    assert expected <= positions and others.isdisjoint(positions)
    responses = [(3, 7), (9, 14), (1, 6), (2, 12)]  # of the one at the start, the first token follows no position
    counts = [sum(max(end - start - 1 - depth, 0) for start, end in responses) for depth in range(learner.depths)]
    assert learner(batch).counts.tolist() == counts
    ranks = learner.ranks(batch, VOCAB)
    for depth in range(learner.depths):
        assert torch.equal(ranks[depth] < VOCAB, batch.supervised(1 + depth))


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_padding_contribute_nothing(name, labels):
    """Whatever they hold. What a response follows may be read by attention, but is no teacher and asks for nothing."""
    model = tiny_model()
    learner = generic(build(name, model, labels=labels)).eval()
    batch = random_batch(model, learner.layers)
    reads_prompts = name.startswith("eagle") or name == "hydra-prefix"
    idle = batch.runs < 0
    if reads_prompts:  # then only what follows the last response of a text is nobody's
        idle = (batch.runs >= 0).flip(1).cumsum(1).flip(1) == 0
    # The token after a run is its last one's successor.
    unread = idle & ~F.pad(batch.runs >= 0, (1, -1))
    garbled = replace(
        batch,
        input_ids=batch.input_ids.masked_fill(unread, 7),
        hidden=batch.hidden.masked_fill(idle[:, :, None], -50.0),
        features=None if batch.features is None else batch.features.masked_fill(idle[:, :, None], -50.0),
    )
    measured = []
    for one in (batch, garbled):
        learner.zero_grad()
        losses = learner(one)
        total(losses).backward()
        measured.append([losses.sums.detach(), losses.hits, losses.counts, *(p.grad for p in learner.parameters())])
    for before, after in zip(*measured, strict=True):
        assert torch.equal(before, after)
    # A position that is supervised, and teaches.
    here = (torch.arange(4)[:, None, None] == 3) & (torch.arange(max(LENGTHS))[:, None] == 5)
    features = None if batch.features is None else batch.features + here
    moved = learner(replace(batch, hidden=batch.hidden + here, features=features))
    assert (moved.sums != measured[0][0]).all()


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize(
    ("lengths", "responses"),
    [((9, 6), ([], [])), ((1,), ([(0, 1)],)), ((0, 4), ([], [])), ((2, 5), ([(1, 2)], [(0, 1), (4, 5)]))],
)
@pytest.mark.parametrize("name", KINDS)
def test_samples_that_supervise_nothing_are_finite_and_count_for_nothing(name, labels, lengths, responses):
    """A prompt alone; a text of one token; padding alone; responses of one token."""
    learner = generic(build(name, tiny_model(), labels=labels))
    losses = learner(random_batch(tiny_model(), learner.layers, responses, lengths))
    total(losses).backward()
    assert losses.sums.tolist() == [0] * learner.depths == losses.counts.tolist() == losses.hits.tolist()
    assert losses.extra is None or losses.extra.item() == 0
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in learner.parameters())
    assert bool((learner.ranks(random_batch(tiny_model(), learner.layers, responses, lengths), 5) == 5).all())


@pytest.mark.parametrize("name", KINDS)
def test_ranks_keep_nothing_for_a_gradient(name, monkeypatch):
    learner = build(name, tiny_model())
    batch = random_batch(tiny_model(), learner.layers)
    unroll, graphs = learner.unroll, []

    def watched(*arguments):
        states = unroll(*arguments)
        graphs.append(states.requires_grad)
        return states

    monkeypatch.setattr(learner, "unroll", watched)
    learner.ranks(batch, 5)
    assert graphs == [False]


@pytest.mark.parametrize("name", KINDS)
def test_responses_too_short_for_all_depths_teach_the_first(name):
    learner = generic(build(name, tiny_model()))
    losses = learner(random_batch(tiny_model(), learner.layers, ([(2, 4)], [(0, 3)]), (4, 3)))
    total(losses).backward()
    assert losses.counts.tolist() == [2, 0, 0][: learner.depths]
    assert losses.sums[0].item() > 0 and not losses.sums[1:].any()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in learner.parameters())


# The target, and precision.


@pytest.mark.parametrize("name", OPTIONS)
def test_the_target_stays_what_it_was(name):
    model = fresh_model(dtype=torch.float32)
    wants = {key: number % 2 == 0 for number, (key, _) in enumerate(model.named_parameters())}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(wants[key])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learner = build(name, model)
    batch = random_batch(model, learner.layers)
    assert not batch.hidden.requires_grad
    optimiser = torch.optim.AdamW(learner.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        total(learner(batch)).backward()
        optimiser.step()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for key, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.requires_grad == wants[key]
    assert not model.training and batch.hidden.grad is None


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_of_the_target_is_trained_or_stored(name):
    model = tiny_model()
    learner = build(name, model, TRIMMED)
    assert list(learner.state_dict()) == [f"heads.{key}" for key in learner.heads.state_dict()]
    assert set(learner.parameters()) == set(learner.heads.parameters())
    theirs = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    tensors = [*learner.parameters(), *learner.buffers()]
    assert theirs.isdisjoint({value.untyped_storage().data_ptr() for value in tensors})
    assert not any(value.shape[0] in (VOCAB, len(TRIMMED)) for value in learner.parameters()), "no table, no LM head"
    assert torch.equal(learner.draft_ids, TRIMMED) and learner.method == OPTIONS[name][0]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_learner_is_the_same_for_the_same_seed(name):
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.cat([value.flatten() for value in build(name, tiny_model()).parameters()]))
    assert torch.equal(states[0], states[1])
    # Some heads start as the identity, with nothing drawn.
    drawn = name == "hydra-prefix" or not name.startswith(("medusa", "hydra"))
    assert torch.equal(states[0], states[2]) != drawn


@pytest.mark.parametrize("name", OPTIONS)
def test_masters_of_a_16_bit_target_are_float32(name):
    model = fresh_model(dtype=torch.bfloat16)
    learner = generic(build(name, model))
    assert {parameter.dtype for parameter in learner.parameters()} == {torch.float32}
    batch = random_batch(model, learner.layers)
    assert batch.hidden.dtype == torch.bfloat16
    warn = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of kernels that do not take what they are given
            losses = learner.eval()(batch)
    finally:
        torch.set_warn_always(warn)
    total(losses).backward()
    assert losses.sums.dtype == torch.float32 and losses.sums.isfinite().all()
    wide = generic(build(name, tiny_model())).eval()
    exact = wide(random_batch(tiny_model(), learner.layers))
    torch.testing.assert_close(losses.sums.double(), exact.sums, rtol=0.15, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = learner(batch)
    total(cast).backward()
    torch.testing.assert_close(cast.sums, losses.sums, rtol=0.1, atol=0)


# EAGLE-1's own.


def test_eagle_1_is_also_drawn_to_the_true_features():
    model = tiny_model()
    learner = generic(build("eagle-unrolled", model)).eval()
    batch = random_batch(model, ())
    rows, losses = learner.rows(batch), learner(batch)
    outputs, distance = learner.unroll(batch, rows)[0], 0.0
    for output, row in zip(outputs, rows.tolist(), strict=True):
        distance += F.smooth_l1_loss(output, batch.hidden.flatten(0, 1)[row + 1], reduction="sum").item()
    width = outputs.shape[1]
    assert losses.extra.item() == pytest.approx(0.3 / width * distance, rel=1e-12) and distance > 1
    (gradient,) = torch.autograd.grad(losses.extra, [learner.heads.fc.weight], retain_graph=True)
    assert gradient.any()
    without = LEARNERS["eagle"].build(model, replace(OPTIONS["eagle-unrolled"][1], regression=0.0), EVERY)
    without.load_state_dict(learner.state_dict())
    assert without(batch).extra is None and torch.equal(without(batch).sums, losses.sums)


def test_eagle_is_measured_as_deep_as_it_drafts():
    model = tiny_model()
    learner = generic(build("eagle", model)).eval()
    deep = LEARNERS["eagle"].build(model, EagleOptions(depths=5), EVERY).eval()
    deep.load_state_dict(learner.state_dict())
    batch = random_batch(model, ())
    ranks = learner.ranks(batch, VOCAB)
    assert learner.depths == 1 and len(ranks) == 5 and torch.equal(ranks, deep.ranks(batch, VOCAB))
    assert len(learner.unroll(batch, learner.rows(batch))) == 1


def test_noise_blurs_the_features_in_training_only():
    learner = generic(build("eagle", tiny_model()))
    batch = random_batch(tiny_model(), ())
    one, other = learner(batch).sums, learner(batch).sums
    torch.manual_seed(3)
    again = learner(batch).sums
    torch.manual_seed(3)
    assert torch.equal(again, learner(batch).sums) and not torch.equal(one, other)
    learner.eval()
    assert torch.equal(learner(batch).sums, learner(batch).sums)
    quiet = LEARNERS["eagle"].build(tiny_model(), EagleOptions(noise=0.0), EVERY)
    quiet.load_state_dict(learner.state_dict())
    assert torch.equal(quiet.train()(batch).sums, learner(batch).sums)


# Checkpoints.


@pytest.mark.parametrize("draft_ids", [EVERY, TRIMMED], ids=["every", "trimmed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_saved_is_what_drafts_without_loss(name, draft_ids, tmp_path):
    model = tiny_model()
    learner = generic(build(name, model, draft_ids))
    learner.save(tmp_path / "heads", {"steps": 3})
    drafter = treedec.load_drafter(tmp_path / "heads", model)
    loaded = (drafter.heads if hasattr(drafter, "heads") else drafter.head).state_dict()
    assert loaded.keys() == learner.heads.state_dict().keys()
    for key, value in learner.heads.state_dict().items():
        assert torch.equal(loaded[key], value if key == "draft_ids" else value.half().to(value.dtype)), key
    expected = reference(model, prompts(2), do_sample=False, max_new_tokens=20)
    out = treedec.generate(model, prompts(2), drafter, do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected.ids) and out.stats.drafted_tokens > 0
    with pytest.raises(FileExistsError):
        learner.save(tmp_path / "heads", {})
    learner.save(tmp_path / "heads", {}, overwrite=True)


# Labels and vocabularies.


@pytest.mark.parametrize("name", KINDS)
def test_hard_labels_are_the_texts_tokens_within_the_draft_vocabulary(name):
    model = tiny_model()
    learner = generic(build(name, model, TRIMMED, "hard")).eval()
    batch = random_batch(model, learner.layers)
    rows, width = learner.rows(batch), batch.input_ids.shape[1]
    losses, states = learner(batch), learner.unroll(batch, rows)
    ranks = learner.ranks(batch, len(TRIMMED))
    for depth in range(learner.depths):
        costs, hits, expected = [], 0, torch.full(batch.runs.shape, len(TRIMMED))
        for state, row in zip(states[depth], rows.tolist(), strict=True):
            b, p = divmod(row, width)
            if not batch.supervised(1 + depth)[b, p]:
                continue
            token = int(batch.input_ids[b, p + 2 + depth])
            if token % 2:
                continue  # it cannot be drafted
            scores = model.lm_head(state)[TRIMMED]
            costs.append(F.cross_entropy(scores, torch.tensor(token // 2)).item())
            expected[b, p] = scores.argsort(descending=True).tolist().index(token // 2)
            hits += int(scores.argmax() == model.lm_head(batch.hidden[b, p + 1 + depth])[TRIMMED].argmax())
        assert losses.sums[depth].item() == pytest.approx(sum(costs), rel=1e-10)
        assert int(losses.counts[depth]) == len(costs) > 0 and int(losses.hits[depth]) == hits
        assert int(losses.counts[depth]) < int(batch.supervised(1 + depth).sum())
        assert torch.equal(ranks[depth], expected)


@pytest.mark.parametrize("method", METHODS)
def test_other_labels_are_refused(method):
    one = LEARNERS[method]
    with pytest.raises(ValueError, match="labels must be one of soft, hard, not 'other'"):
        one.build(tiny_model(), one.options(), EVERY, labels="other")


@pytest.mark.parametrize(
    ("method", "options", "shape"),
    [
        ("medusa", MedusaOptions(heads=2, blocks=3), {"heads": 2, "blocks": 3}),
        ("hydra", HydraOptions(heads=2, blocks=3), {"heads": 2, "blocks": 3, "prefix": None}),
        ("recurrent", RecurrentOptions(2, 16, 24, (1,)), {"state_size": 16, "inner_size": 24, "features": (1,)}),
        ("recurrent", RecurrentOptions(2), {"state_size": 32, "inner_size": 64, "features": (0, 1)}),
        ("eagle", EagleOptions(2, 48), {"version": 1, "intermediate_size": 48, "features": ()}),
        ("eagle3", Eagle3Options(2, (1,), 48), {"version": 3, "intermediate_size": 48, "features": (1,)}),
        ("eagle3", Eagle3Options(2, fc_norm=True), {"fc_norm": True, "norm_before_residual": False}),
        ("eagle3", Eagle3Options(2, norm_before_residual=True), {"fc_norm": False, "norm_before_residual": True}),
        # Else it is the target's.
        ("eagle", EagleOptions(2), {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}),
    ],
)
def test_options_make_the_head_that_is_trained(method, options, shape):
    learner = LEARNERS[method].build(tiny_model(), options, TRIMMED)
    config = learner.heads.config
    assert {name: getattr(config, name) for name in shape} == shape and learner.depths == 2
    assert config.draft_vocab_size == len(TRIMMED)
    assert learner.layers == getattr(config, "features", ())


def test_eagle_starts_from_the_spread_of_the_target():
    model = fresh_model(initializer_range=0.5)
    for method in ("eagle", "eagle3"):
        learner = LEARNERS[method].build(model, LEARNERS[method].options(), EVERY)
        for part in (learner.heads.fc, learner.heads.layer.mlp.down_proj, learner.heads.layer.self_attn.o_proj):
            assert part.weight.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_defaults_and_says_what_it_is(method):
    one = LEARNERS[method]
    learner = one.build(tiny_model(), one.options(), EVERY)
    assert learner.method == method and learner.offset == 1 and learner.labels == "soft"
    losses = learner(random_batch(tiny_model(), learner.layers))
    assert losses.sums.shape == losses.hits.shape == losses.counts.shape == (learner.depths,)
    assert set(learner.layers) <= {0, 1}, "of a target with two layers"
