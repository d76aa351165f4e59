"""Every shipped way to draft: exact with any rule, and right about what it drafts."""

import doctest

import pytest
import torch
from kit import DECODING, VOCAB, fresh_model, prompts, ragged_prompts, reference, tiny_model
from torch.nn import functional as F

import treedec
import treedec.drafter
from treedec import BestFirst, StaticTree, TreeError
from treedec.drafter import Drafting, DraftState
from treedec.heads import DraftModelDrafter, MedusaConfig, MedusaDrafter, MedusaHeads, NgramDrafter, load_drafter
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
        "ngram": NgramDrafter(shortest=1),
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


@pytest.mark.parametrize("acceptance", ["coupled", "residual"])
def test_a_draft_model_equal_to_its_target_is_accepted_for_200_rounds(acceptance):
    model, depth = tiny_model(), 2
    drafter = DraftModelDrafter(model, depth)
    output = treedec.generate(
        model, prompts(), drafter, acceptance=acceptance, max_new_tokens=1 + 3 * 70, return_dict_in_generate=True,
        **DECODING["T=1.0"],
    )  # fmt: skip
    assert output.stats.accepted_lengths == {depth + 1: 70}


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
        texts=texts, hidden=hidden, features=[None] * len(texts), room=[room] * len(texts), budget=64, drafting=Drafting.TOP,
        shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip


def test_a_draft_model_stops_drafting_where_its_own_context_ends():
    model, draft = tiny_model("gpt2"), fresh_model("gpt2", n_positions=20, seed=0)
    expected = reference(model, prompts(), max_new_tokens=NEW, do_sample=False)
    ours = treedec.generate(model, prompts(), DraftModelDrafter(draft), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(ours, expected.ids)


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"vocabulary of 64 tokens and the target one of 97"):
        treedec.generate(tiny_model(), prompts(), DraftModelDrafter(fresh_model(vocab_size=64)), max_new_tokens=4)


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
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),  # the longest suffix that occurred before
        ([1, 2, 3, 8, 1, 2, 7, 1, 2], [7, 1, 2]),  # the most recent of its occurrences
        ([5, 1, 2, 3, 6, 9, 2, 3, 4, 5, 1, 2, 3], [6, 9, 2]),  # a longer match further back
        ([1, 1, 1], [1]),  # an occurrence may touch the suffix
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_ngram_continues_the_longest_most_recent_match(text, expected):
    assert NgramDrafter(depth=3, longest=4, shortest=2).continuation(text) == expected


def test_shipped_heads_on_the_demo_target():
    """Token equality on the real model, and drafts that are worth something."""
    model, tokenizer = treedec.load_target("demo", dtype=torch.float32)
    drafter = treedec.load_drafter("demo", model)
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
            assert output.stats.mean_accepted_length > 1.2


def test_the_example_in_the_documentation_of_drafters_runs():

    result = doctest.testmod(treedec.drafter)
    assert result.attempted > 0
    assert result.failed == 0
