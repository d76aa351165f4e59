"""Recorded p and q against plain forward passes over the same text, and what is expected from them."""

from __future__ import annotations

import pytest
import torch
from kit import VOCAB, fresh_model, prompts, tiny_model
from torch.nn import functional as F

import treedec
from treedec.benchmarks import distributions
from treedec.benchmarks.distributions import expectations, recorded, spread
from treedec.benchmarks.methods import Engine, conditions_of, parse_methods
from treedec.benchmarks.theory import RULES, expected_acceptance
from treedec.growth import BestFirst, DynamicTree
from treedec.heads import (
    DraftModelDrafter,
    MedusaConfig,
    MedusaDrafter,
    MedusaHeads,
    NgramDrafter,
    RecurrentConfig,
    RecurrentDrafter,
    RecurrentHead,
    UnionDrafter,
)

DRAFT_IDS = torch.arange(1, VOCAB, 3)
TEMPERATURE, NEW, LENGTH = 0.7, 10, 12


def medusa(model):
    heads = MedusaHeads(MedusaConfig(32, VOCAB, 2, 1, len(DRAFT_IDS)), DRAFT_IDS).double()
    torch.nn.init.normal_(heads.weight, std=0.3)
    return MedusaDrafter(heads, model, BestFirst(8, min_probability=0.0))


def recurrent(model):
    config = RecurrentConfig(hidden_size=32, vocab_size=VOCAB, draft_vocab_size=VOCAB, state_size=16, inner_size=24)
    return RecurrentDrafter(
        RecurrentHead(config).double(), model, DynamicTree(8, 3, 2, 2, min_probability=0.0, min_reach=0.0)
    )


def guesses(drafter, model, text):
    """`[n, V]` logits of what the drafter says follows the tokens at `LENGTH`, …, by passes over the whole text."""
    roots = torch.arange(LENGTH, text.shape[1] - 2)
    hidden = treedec.Target(model).features(text)[0]
    if isinstance(drafter, MedusaDrafter):
        logits = torch.full((len(roots), VOCAB), -torch.inf, dtype=torch.double)
        logits[:, DRAFT_IDS] = drafter.logits(hidden[roots - 1], depths=1)[0]
        return logits
    if isinstance(drafter, RecurrentDrafter):
        return model.lm_head(drafter.head(hidden[roots - 1], model.get_input_embeddings()(text[0, roots])[None])[0])
    return drafter._target.model(text).logits[0, roots]


@pytest.mark.parametrize("build", [medusa, recurrent, lambda _: DraftModelDrafter(fresh_model(seed=5), depth=3)])
def test_p_and_q_are_those_of_plain_passes_over_the_text(build):
    model = tiny_model()
    drafter, ids = build(model), prompts()
    text = treedec.generate(
        model, ids, None, max_new_tokens=NEW, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, seed=3
    )
    pairs = recorded(treedec.Target(model), drafter, ids, TEMPERATURE, NEW, seed=3)
    p, q = (torch.stack(side) for side in zip(*pairs, strict=True))
    # Of all tokens behind the first but the last, after which nothing is drafted any more.
    logits = model(text).logits[0, LENGTH:-2]
    torch.testing.assert_close(p, (logits.float() / TEMPERATURE).softmax(-1))
    expected = (guesses(drafter, model, text).float() / TEMPERATURE).softmax(-1)
    torch.testing.assert_close(q, expected)
    assert float((p - q).abs().sum(-1).min()) > 0.01  # else the wrong one of the two would do


def test_expectations_are_means_over_the_positions_of_all_texts(monkeypatch):
    monkeypatch.setattr(distributions, "TOKENS", NEW)
    monkeypatch.setattr(distributions, "POSITIONS", 3)
    model = tiny_model()
    target, drafter, texts = treedec.Target(model), medusa(model), [prompts(), prompts()[:, 4:]]
    unknown = [("ngram", NgramDrafter()), ("union", UnionDrafter(NgramDrafter(), drafter))]
    found = expectations(target, [*unknown, ("mine", drafter)], texts, [0.5, 1.0], seed=3)
    assert {(each.method, each.temperature, each.positions) for each in found} == {("mine", 0.5, 6), ("mine", 1.0, 6)}
    assert {each.rule for each in found} == set(RULES) and {each.drafts for each in found} == {1, 2, 4, 8}
    pairs = [
        pair
        for place, text in enumerate(texts)
        for pair in spread(recorded(target, drafter, text, 0.5, NEW, 3 + place), 3)
    ]
    p, q = (torch.stack(side) for side in zip(*pairs, strict=True))
    again = expected_acceptance(p, q, (1, 2, 4, 8), distributions.DRAWS, seed=3, texts=[0, 0, 0, 1, 1, 1])
    assert [(each.rule, each.drafts, each.acceptance, each.error) for each in found[: len(again)]] == [
        (each.rule, each.drafts, each.acceptance, each.error) for each in again
    ]


def test_texts_that_end_at_once_expect_nothing():
    model = fresh_model()
    model.generation_config.eos_token_id = list(range(VOCAB))
    target = treedec.Target(model)
    assert expectations(target, [("mine", DraftModelDrafter(model))], [prompts()], [1.0]) == ()


def test_a_draft_model_that_is_the_target_is_always_accepted():
    model = fresh_model()
    found = expectations(treedec.Target(model), [("mine", DraftModelDrafter(model))], [prompts()], [1.0])
    assert {round(each.acceptance, 5) for each in found if each.rule in ("coupled", "residual", "optimum")} == {1.0}


def test_drafters_are_told_once_for_all_their_conditions(folder):
    model = fresh_model(dtype=torch.float32)
    engine = Engine(model, None, max_new_tokens=NEW, draft_model=model)
    methods = parse_methods(["hf", "ar", "vanilla", "vanilla@3", f"{folder}@4", str(folder)], "mine")
    for condition, method in conditions_of(methods, [0.0, 1.0], ["coupled", "residual"], [1]):
        engine.prepare(condition, method)
    assert [name for name, _ in engine.drafters] == ["ar", "vanilla", f"{folder.name}@4"]


def test_items_are_spread():
    assert spread(range(10), 2) == [2, 7] and spread(range(10), 1) == [5]
    assert spread(range(3), 8) == [0, 1, 2] and spread([], 4) == []
    assert len(set(spread(range(100), 7))) == 7


def test_logits_of_a_trimmed_vocabulary_are_put_in_their_places():
    model = tiny_model()
    for _, q in recorded(treedec.Target(model), medusa(model), prompts(), 1.0, NEW, seed=0):
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, DRAFT_IDS, False)
        assert float(q[others].sum()) == 0 and float(q.sum()) == pytest.approx(1, abs=1e-5)
        assert F.one_hot(q.argmax(), VOCAB)[DRAFT_IDS].sum() == 1
