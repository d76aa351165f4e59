"""Every shipped way to draft: exact with any rule, and right about what it drafts."""

import doctest
from dataclasses import replace

import pytest
import torch
from kit import DECODING, VOCAB, fresh_model, prompts, ragged_prompts, reference, tiny_model
from torch.nn import functional as F

import treedec
import treedec.drafter
from treedec import BestFirst, StaticTree, TreeError
from treedec.chance import TorchChance
from treedec.drafter import Draft, Drafter, Drafting, DraftSession, DraftState
from treedec.heads import (
    DraftModelDrafter,
    MedusaConfig,
    MedusaDrafter,
    MedusaHeads,
    NgramDrafter,
    UnionDrafter,
    load_drafter,
)
from treedec.heads.checkpoint import save_heads
from treedec.models import Fingerprint

NEW = 40


def medusa_heads(model, heads=3, draft_ids=None, seed=0):
    """Heads with random weights, over the whole vocabulary or some of it."""
    ids = torch.arange(VOCAB) if draft_ids is None else draft_ids
    module = MedusaHeads(MedusaConfig(32, VOCAB, heads, 1, len(ids)), ids)
    with torch.no_grad():
        module.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    return module.to(model.dtype)


def nearly(model):
    """A draft model that often agrees with the target."""
    draft = fresh_model("llama")
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return draft


def every_drafter(model):
    trimmed = torch.arange(0, VOCAB, 2)
    return {
        "medusa": MedusaDrafter(medusa_heads(model), model, BestFirst(nodes=12, branching=5)),
        "medusa-trimmed": MedusaDrafter(medusa_heads(model, draft_ids=trimmed), model, BestFirst(nodes=9)),
        "medusa-static": MedusaDrafter(medusa_heads(model), model, StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 1)))),
        "draft-model": DraftModelDrafter(nearly(model), depth=3),
        "ngram": NgramDrafter(min_probability=0),
        "union": UnionDrafter(NgramDrafter(min_probability=0), DraftModelDrafter(nearly(model), depth=3), nodes=8),
        "none": None,
    }


def test_a11_every_drafter_leaves_the_tokens_of_a_ragged_batch_alone():
    model, (ids, mask) = tiny_model(), ragged_prompts()
    for decoding in ("greedy", "T=1.0", "top_p"):
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
        expected = reference(model, ids, **arguments)
        for name, drafter in every_drafter(model).items():
            torch.manual_seed(7)
            ours = treedec.generate(model, ids, drafter, **arguments)
            assert torch.equal(ours, expected.ids), (decoding, name)
            assert torch.equal(torch.get_rng_state(), expected.rng_state), (decoding, name)


@pytest.mark.parametrize("acceptance", ["greedy", "coupled", "residual"])
def test_a_draft_model_equal_to_its_target_is_accepted_for_200_rounds(acceptance):
    model, depth = tiny_model(), 2
    drafter = DraftModelDrafter(model, depth)
    output = treedec.generate(
        model, prompts(), drafter, acceptance=acceptance, max_new_tokens=1 + 3 * 200, return_dict_in_generate=True,
        **DECODING["greedy" if acceptance == "greedy" else "T=1.0"],
    )  # fmt: skip
    assert output.stats.accepted_lengths == {depth + 1: 200}


class Spoils(Drafter):
    """Spoils one level of a chain in two rounds of three, and notes how much was accepted of what was left."""

    name, features = "spoils", None

    def __init__(self, drafter):
        self.inner, self.max_nodes, self.rounds = drafter, drafter.max_nodes, []

    def start(self, target, batch, capacity):
        return SpoilsSession(self, self.inner.start(target, batch, capacity))


class SpoilsSession(DraftSession):
    def __init__(self, drafter, inner):
        self.drafter, self.inner, self.intact = drafter, inner, []

    def propose(self, state):
        tree = self.inner.propose(state).tree
        tokens, depth = tree.tokens.clone(), tree.width - 1
        self.intact = []
        for row, count in enumerate(tree.counts.tolist()):
            level = (len(self.drafter.rounds) + row) % (2 * depth + 1)
            if level in range(1, count):
                tokens[row, level] = (tokens[row, level] + 1) % VOCAB
            self.intact.append(min(level, count) if level else count)
        return Draft(replace(tree, tokens=tokens))

    def observe(self, outcome):
        self.drafter.rounds.append((self.intact, [len(path) for path in outcome.paths]))
        self.inner.observe(outcome)


@pytest.mark.parametrize("acceptance", ["greedy", "coupled"])
def test_between_rejections_a_draft_model_equal_to_its_target_is_still_accepted_wholly(acceptance):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    drafter = Spoils(DraftModelDrafter(model, depth=3))
    arguments = {"attention_mask": mask, **DECODING["greedy" if acceptance == "greedy" else "T=1.0"]}
    treedec.generate(model, ids, drafter, acceptance=acceptance, max_new_tokens=640, seed=7, **arguments)
    assert len(drafter.rounds) > 200
    for intact, accepted in drafter.rounds:
        assert all(right == got for right, got in zip(intact, accepted, strict=True) if got)
    assert {length for _, accepted in drafter.rounds for length in accepted} >= {1, 2, 3, 4}


def test_a_draft_model_catches_up_after_every_kind_of_rejection():
    """Its cache is right only if it goes on agreeing where a fresh one would."""
    model, draft = tiny_model(), nearly(tiny_model())
    ids = prompts()
    expected = reference(model, ids, max_new_tokens=NEW, do_sample=False).ids[0].tolist()
    session = DraftModelDrafter(draft, depth=3).start(treedec.Target(model), 1, 100)
    place, lengths = ids.shape[1], []
    while place < len(expected) - 4:
        text = expected[:place]
        tree = session.propose(greedy_state([text])).tree
        fresh = draft.generate(torch.tensor([text]), max_new_tokens=3, do_sample=False)[0, place:].tolist()
        assert tree.tokens[0].tolist() == [text[-1], *fresh]
        accepted = next((i for i, token in enumerate(fresh) if token != expected[place + i]), 3)
        committed = expected[place : place + accepted + 1]
        session.observe(treedec.Outcome([list(range(accepted + 1))], [committed]))
        place += len(committed)
        lengths.append(accepted)
    assert {0, 3} <= set(lengths)


def greedy_state(texts, hidden=None, room=8):
    return DraftState(
        texts=texts, hidden=hidden, features=[None] * len(texts), room=[room] * len(texts), budget=64,
        drafting=Drafting.TOP, shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip


def test_a_draft_model_stops_drafting_where_its_own_context_ends():
    model, draft = tiny_model("gpt2"), fresh_model("gpt2", n_positions=20, seed=0)
    expected = reference(model, prompts(), max_new_tokens=NEW, do_sample=False)
    ours = treedec.generate(model, prompts(), DraftModelDrafter(draft), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(ours, expected.ids)


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"vocabulary of 64 tokens and the target one of 97"):
        treedec.generate(tiny_model(), prompts(), DraftModelDrafter(fresh_model(vocab_size=64)), max_new_tokens=4)


@pytest.mark.parametrize(("rows", "draft_rows"), [(VOCAB, VOCAB + 31), (VOCAB + 31, VOCAB)])
def test_lm_heads_that_differ_in_their_padding_draft_for_each_other(rows, draft_rows):
    """Neither is drafted beyond the vocabulary of the target, nor read beyond that of the draft model."""
    model, draft = with_rows(tiny_model(), rows), with_rows(nearly(tiny_model()), draft_rows)
    drafter = DraftModelDrafter(draft, depth=3, same_tokenizer=True)
    ids, mask = ragged_prompts()
    ids[0, 3] = rows - 1  # which the smaller draft model does not have
    for decoding in ("greedy", "T=1.3", "top_p"):
        arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
        expected = reference(model, ids, **arguments)
        output = treedec.generate(model, ids, drafter, seed=7, return_dict_in_generate=True, **arguments)
        assert torch.equal(output.sequences, expected.ids)
        # The target's additional rows are as random as the others, and win a third of the text.
        assert decoding != "greedy" or output.stats.mean_accepted_length > 1.1
    with pytest.raises(ValueError, match="same_tokenizer=True"):
        treedec.generate(model, ids, DraftModelDrafter(draft), attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize(("rows", "draft_rows"), [(VOCAB, VOCAB + 31), (VOCAB + 31, VOCAB)])
def test_a_padded_draft_model_claims_distributions_over_the_vocabulary_of_the_target(rows, draft_rows):
    """What the residual rules are exact with: q over V, whose tokens were drawn from it and from nothing else."""
    model, draft = with_rows(tiny_model(), rows), with_rows(nearly(tiny_model()), draft_rows)
    session = DraftModelDrafter(draft, depth=2, same_tokenizer=True).start(treedec.Target(model), 1, 100)
    text = prompts()[0].tolist()
    state = replace(greedy_state([text]), drafting=Drafting.SAMPLED, chance=TorchChance())
    drafted = session.propose(state)
    shared = min(rows, draft_rows)
    for place in range(2):
        path = torch.tensor([text + drafted.tree.tokens[0, 1 : 1 + place].tolist()])
        expected = torch.zeros(rows, dtype=torch.float64)
        expected[:shared] = draft(path).logits[0, -1, :shared].softmax(-1)
        torch.testing.assert_close(drafted.probabilities[0, place], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("drafting", [Drafting.TOP, Drafting.COUPLED])
def test_the_scores_of_a_chain_are_the_odds_of_its_tokens_multiplied(drafting):
    draft, text = nearly(tiny_model()), prompts()[0].tolist()
    noise = torch.empty(3, 1, VOCAB).exponential_(generator=torch.Generator().manual_seed(0))
    state = replace(greedy_state([text, None]), drafting=drafting, noise=lambda depth: noise[depth - 1].expand(2, -1))
    drafted = DraftModelDrafter(draft, depth=3).start(treedec.Target(tiny_model()), 2, 100).propose(state)
    expected = [1.0]
    for place in range(3):
        q = draft(torch.tensor([text])).logits[0, -1].softmax(-1)
        odds = state.odds(q.expand(2, -1), place + 1)[0]
        assert torch.equal(odds, q) is (drafting is Drafting.TOP)
        text.append(int(odds.argmax()))
        expected.append(expected[-1] * float(odds.max()))
    assert drafted.tree.tokens[0].tolist() == text[-4:]
    torch.testing.assert_close(drafted.scores[0], torch.tensor(expected, dtype=torch.float64))


def with_rows(model, rows):
    """A model with the weights of another, whose embedding and LM head have more rows."""
    padded = fresh_model(vocab_size=rows, seed=5)
    state = padded.state_dict()
    for name, weight in model.state_dict().items():
        if weight.shape == state[name].shape:
            state[name] = weight
        else:
            state[name][: len(weight)] = weight
    padded.load_state_dict(state)
    return padded


def test_medusa_candidates_are_the_best_tokens_of_each_head():
    model = tiny_model()
    heads = medusa_heads(model, draft_ids=torch.arange(3, VOCAB, 3))
    drafter = MedusaDrafter(heads, model, BestFirst(branching=4))
    hidden = torch.randn(2, 32, dtype=torch.float64)
    ids, scores = drafter.candidates(greedy_state([[1], [2]], hidden))
    for row in range(2):
        for head in range(3):
            x = hidden[row]
            x = x + F.silu(heads.weight[head, 0] @ x + heads.bias[head, 0])
            probabilities = (model.lm_head.weight[heads.draft_ids] @ x).softmax(-1)
            best = probabilities.argsort(descending=True)[:4]
            assert ids[row][head] == heads.draft_ids[best].tolist()
            torch.testing.assert_close(
                torch.tensor(scores[row][head], dtype=torch.float64), probabilities[best].detach()
            )


class AddsItsOwn:
    """A growth policy that knows nothing of costs, and adds a token that nobody proposed and a level below the last."""

    depth, branching, nodes = None, 2, 6

    def grow(self, root, candidates, limit):
        (first, second), (third, _) = candidates[0][0], candidates[1][0]
        return [root, first, 90, third, second, 91], [-1, 0, 0, 1, 0, 3]


def test_medusa_scores_are_products_along_paths(monkeypatch):
    model = tiny_model()
    drafter = MedusaDrafter(medusa_heads(model), model, AddsItsOwn())
    offered = [[[10, 11], [20, 21]]], [[[0.5, 0.25], [0.75, 0.125]]]
    monkeypatch.setattr(drafter, "candidates", lambda state: offered)
    session = drafter.start(treedec.Target(model), 1, 30)
    draft = session.propose(greedy_state([[7]], torch.zeros(1, 32)))
    assert draft.tree.tokens.tolist() == [[7, 10, 90, 20, 11, 91]]
    assert draft.scores.tolist() == [[1.0, 0.5, 0.0, 0.375, 0.25, 0.0]]


def test_untrained_medusa_heads_repeat_the_prediction_of_the_target():
    """Also where the model caps its logits: the heads go the model's own way from hidden state to score."""
    for name in ("llama", "gemma2"):
        model = tiny_model(name)
        target = treedec.Target(model)
        drafter = MedusaDrafter(
            MedusaHeads(MedusaConfig(32, VOCAB, 2, 1, VOCAB)).double(), model, BestFirst(branching=5)
        )
        cache = target.allocate(1, 32)
        verified = target.prefill(cache, prompts())
        ids, scores = drafter.candidates(greedy_state([[1]], verified.hidden[:, -1]))
        expected = verified.logits[0, -1].softmax(-1).topk(5)
        assert ids[0][1] == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(scores[0][0], dtype=torch.float64), expected.values, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["llama", "granite", "cohere", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_untrained_medusa_logits_are_the_model_s_own(name, tied):
    """Scaled (granite, cohere), capped (gemma 2), and with the embeddings for an LM head."""
    model = fresh_model(name, tie_word_embeddings=tied)
    heads = MedusaHeads(MedusaConfig(32, VOCAB, 2, 1, 40), torch.arange(40) * 2).double()
    verified = treedec.Target(model).prefill(treedec.Target(model).allocate(1, 32), prompts())
    for logits in MedusaDrafter(heads, model, BestFirst()).logits(verified.hidden[:, -1], depths=2):
        torch.testing.assert_close(logits[0], verified.logits[0, -1, heads.draft_ids], atol=1e-9, rtol=0)


@pytest.mark.parametrize("own", [False, True])
def test_medusa_logits_are_those_of_the_paper(own):
    """Cai et al. 2024, equation 1: softmax(W2 (silu(W1 h) + h)), with a bias, two blocks and a trimmed vocabulary."""
    model, generator = tiny_model(), torch.Generator().manual_seed(3)
    config = MedusaConfig(32, VOCAB, heads=3, blocks=2, draft_vocab_size=20, own_lm_heads=own)
    heads = MedusaHeads(config, torch.arange(20) * 4 + 1).double().requires_grad_(False)
    for parameter in heads.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(4, 32, generator=generator, dtype=torch.float64)
    found = MedusaDrafter(heads, model, BestFirst(4)).logits(hidden, depths=3)
    for head in range(3):
        rows = heads.lm_heads[head] if own else model.lm_head.weight[heads.draft_ids]
        for place, x in enumerate(hidden):
            for block in range(2):
                inner = torch.stack(
                    [sum(w * v for w, v in zip(row, x, strict=True)) for row in heads.weight[head, block]]
                )
                inner = inner + heads.bias[head, block]
                x = x + inner / (1 + (-inner).exp())
            torch.testing.assert_close(found[head, place], rows @ x, atol=1e-9, rtol=0)


def test_a12_a_tree_that_does_not_fit_the_heads_is_refused_before_generation():
    model = tiny_model()
    heads = medusa_heads(model, heads=2)
    with pytest.raises(ValueError, match="3 levels deep, but there are only 2 Medusa heads"):
        MedusaDrafter(heads, model, StaticTree(((0,), (0, 0), (0, 0, 0))))
    with pytest.raises(ValueError, match="takes 98 candidates a level"):
        MedusaDrafter(heads, model, BestFirst(branching=98))
    with pytest.raises(TreeError, match="has no parent"):
        StaticTree(((0,), (1, 0)))


def test_a20_heads_of_another_model_are_refused(tmp_path):
    model, other = tiny_model(), fresh_model(seed=1)
    save_heads(tmp_path / "heads", medusa_heads(model), Fingerprint.of(model), {})
    assert load_drafter(tmp_path / "heads", model).name == "medusa"
    with pytest.raises(ValueError, match="LM head differ"):
        load_drafter(tmp_path / "heads", other)
    with pytest.raises(ValueError, match="belong to another model"):
        MedusaDrafter(medusa_heads(model), fresh_model(vocab_size=64), BestFirst())


def test_a_folder_with_a_language_model_becomes_a_draft_model(tmp_path):
    model = tiny_model()
    nearly(model).save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, model, tree=4)
    assert (drafter.name, drafter.max_nodes) == ("draft-model", 4)


@pytest.mark.parametrize("name", ["nothing-here", "demo:eagle9"])
def test_an_unknown_drafter_is_refused(name):
    with pytest.raises(FileNotFoundError, match=name.partition(":")[2] or name):
        load_drafter(name, tiny_model())


@pytest.mark.parametrize(
    ("name", "method", "enough"),
    [("demo", "eagle3", 1.8), ("demo:recurrent", "recurrent", 1.6), ("demo:medusa", "medusa", 1.2)],
)
def test_shipped_heads_on_the_demo_target(name, method, enough):
    """Token equality on the real model, and drafts that are worth something."""
    model, tokenizer = treedec.load_target("demo", dtype=torch.float32)
    drafter = treedec.load_drafter(name, model)
    assert drafter.name == method
    chat = [{"role": "user", "content": "Name three primary colours."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    for decoding in ("greedy", "T=1.0"):
        arguments = {"max_new_tokens": 24, **DECODING[decoding]}
        expected = reference(model, ids["input_ids"], **arguments)
        torch.manual_seed(7)
        output = treedec.generate(model, ids["input_ids"], drafter, return_dict_in_generate=True, **arguments)
        assert torch.equal(output.sequences, expected.ids)
        assert output.lossless
        if decoding == "greedy":
            assert output.stats.mean_accepted_length > enough


def test_the_example_in_the_documentation_of_drafters_runs():

    result = doctest.testmod(treedec.drafter)
    assert result.attempted > 0
    assert result.failed == 0
