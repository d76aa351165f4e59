"""The Medusa loss against its plain twin, its gradient, and what it supervises (A21)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, LlamaForCausalLM

from treedec.target import Target
from treedec.training.losses import DraftHead, agreement, draft_logits, medusa_loss

HEADS, HIDDEN, DRAFT = 3, 8, 13
RUNS = [9, 2, 1, 5]  # rows of each run; the third supervises nothing, the second one head only


def problem(runs=RUNS, dtype=torch.float64, bias=False, cap=None):
    generator = torch.Generator().manual_seed(3)
    rows = sum(runs)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    starts = torch.tensor([first for first, size in zip(_firsts(runs), runs, strict=True) for _ in range(size)])
    return (
        random(HEADS, rows, HIDDEN),
        random(rows, HIDDEN),
        starts.long(),
        DraftHead(random(DRAFT, HIDDEN), random(DRAFT) if bias else None, cap),
    )


def _firsts(runs):
    return [sum(runs[:i]) for i in range(len(runs))]


def plain_loss(states, hidden, runs, head):
    """The definition, run by run: head `k` at row `t` against the target at row `t + 1 + k`."""

    def scores(state):
        z = head.weight @ state + (0 if head.bias is None else head.bias)
        return z if head.cap is None else head.cap * (z / head.cap).tanh()

    losses, hits, counts = [], [], []
    for k in range(len(states)):
        kls, right = [], []
        for first, size in zip(_firsts(runs), runs, strict=True):
            for t in range(first, first + size - 1 - k):
                p = scores(hidden[t + 1 + k]).softmax(-1)
                q = scores(states[k, t]).log_softmax(-1)
                kls.append(F.kl_div(q, p, reduction="sum"))
                right.append(int(q.argmax() == p.argmax()))
        losses.append(torch.stack(kls).mean() if kls else states.new_zeros(()))
        hits.append(sum(right))
        counts.append(len(right))
    return torch.stack(losses), hits, counts


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_and_gradient_equal_the_plain_twin(block, bias, cap):
    states, hidden, starts, head = problem(bias=bias, cap=cap)
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    mine, theirs = states.clone().requires_grad_(), states.clone().requires_grad_()
    losses = medusa_loss(mine, hidden, starts, head, block)
    expected, hits, counts = plain_loss(theirs, hidden, RUNS, head)
    torch.testing.assert_close(losses.kl, expected, rtol=1e-12, atol=1e-12)
    assert losses.hits.tolist() == hits and losses.counts.tolist() == counts
    assert 0 < sum(hits) < sum(counts), "the case must have both right and wrong drafts"
    losses.total(weights).backward()
    (weights * expected).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block", [3, 256])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradcheck(block, cap):
    states, hidden, starts, head = problem(cap=cap)
    states.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: medusa_loss(x, hidden, starts, head, block).kl, (states,))


def test_the_loss_of_a_perfect_head_is_zero_at_its_own_offset_only():
    _, hidden, starts, head = problem([20])
    for k in range(HEADS):
        states = torch.zeros(HEADS, 20, HIDDEN, dtype=torch.float64)
        states[:, : 20 - 1 - k] = hidden[1 + k :]  # every head says what is right for head k
        kl = medusa_loss(states, hidden, starts, head).kl
        for other in range(HEADS):
            if other == k:
                assert abs(float(kl[other])) < 1e-12
            else:
                assert float(kl[other]) > 0.1


def test_every_supervised_row_and_no_other_gets_a_gradient():
    states, hidden, starts, head = problem()
    states.requires_grad_()
    medusa_loss(states, hidden, starts, head).kl.sum().backward()
    for k in range(HEADS):
        expected = [
            t - first < size - 1 - k
            for first, size in zip(_firsts(RUNS), RUNS, strict=True)
            for t in range(first, first + size)
        ]
        assert (states.grad[k] != 0).any(-1).tolist() == expected


def test_rows_of_another_run_teach_nothing():
    states, hidden, starts, head = problem()
    before = medusa_loss(states, hidden, starts, head).kl
    changed = hidden.clone()
    changed[torch.tensor(_firsts(RUNS))] += 100  # the first state of a run is read, never imitated
    assert torch.equal(medusa_loss(states, changed, starts, head).kl, before)
    changed[1] += 1
    assert not torch.equal(medusa_loss(states, changed, starts, head).kl, before)


@pytest.mark.parametrize("runs", [[], [1], [1, 1, 1]])
def test_a_batch_without_supervision_is_finite_and_zero(runs):
    states, hidden, starts, head = problem(runs, torch.float32)
    states.requires_grad_()
    losses = medusa_loss(states, hidden, starts, head)
    total = losses.total(torch.ones(HEADS))
    total.backward()
    assert total.item() == 0 and losses.counts.tolist() == [0] * HEADS
    assert torch.equal(states.grad, torch.zeros_like(states))


def test_huge_logits_stay_finite():
    states, hidden, starts, head = problem(dtype=torch.float32)
    states = (states * 1e4).requires_grad_()
    losses = medusa_loss(states, hidden * 1e4, starts, head)
    losses.kl.sum().backward()
    assert losses.kl.isfinite().all() and states.grad.isfinite().all()


def test_bfloat16_follows_float32():
    states, hidden, starts, head = problem([64], torch.float32)
    narrow = DraftHead(head.weight.bfloat16())
    wide = DraftHead(narrow.weight.float())
    hidden = hidden.bfloat16().float()
    exact, rounded = states.bfloat16().float().requires_grad_(), states.bfloat16().float().requires_grad_()
    a, b = medusa_loss(exact, hidden, starts, wide), medusa_loss(rounded, hidden.bfloat16(), starts, narrow)
    a.kl.sum().backward()
    b.kl.sum().backward()
    assert b.kl.dtype == torch.float32 and rounded.grad.dtype == torch.float32
    torch.testing.assert_close(b.kl, a.kl, rtol=2e-2, atol=0)
    assert F.cosine_similarity(exact.grad.flatten(), rounded.grad.flatten(), dim=0) > 0.999


def test_agreement_counts_ranks_of_the_greedy_token():
    states, hidden, starts, head = problem()
    draft_ids = torch.arange(DRAFT) * 2 + 1  # odd ids only
    greedy = draft_ids[draft_logits(hidden, head).argmax(-1)]
    greedy[4] = 6  # a token that cannot be drafted
    for block in (2, 256):
        ranks, counts = agreement(states, starts, greedy, draft_ids, head, top=4, block=block)
        expected = torch.zeros(HEADS, 4, dtype=torch.long)
        seen = [0] * HEADS
        for k in range(HEADS):
            for first, size in zip(_firsts(RUNS), RUNS, strict=True):
                for t in range(first, first + size - 1 - k):
                    order = draft_ids[(head.weight @ states[k, t]).argsort(descending=True)][:4].tolist()
                    seen[k] += 1
                    if int(greedy[t + 1 + k]) in order:
                        expected[k, order.index(int(greedy[t + 1 + k]))] += 1
        assert torch.equal(ranks, expected) and counts.tolist() == seen
    assert ranks.sum() > 0


def test_the_draft_head_is_a_copy_of_the_models_rows():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    )
    ids = torch.tensor([3, 50, 96])
    head = DraftHead.of(model, ids)
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(draft_logits(hidden, head), model.lm_head(hidden)[:, ids])
    assert not head.weight.requires_grad and head.weight.data_ptr() != model.lm_head.weight.data_ptr()


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SCORING = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0),
    "granite": GraniteConfig(**SHAPE, logits_scaling=8.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
}


def scoring_model(name, dtype=torch.float64):
    model = AutoModelForCausalLM.from_config(SCORING[name], dtype=torch.float64).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model.to(dtype)


@pytest.mark.parametrize("name", SCORING)
def test_the_draft_head_scores_as_the_target_does(name):
    """Logits that a model scales or caps after its LM head are so for the teacher and the heads, too."""
    model, ids = scoring_model(name), torch.tensor([3, 50, 96])
    hidden = torch.randn(5, 32, dtype=torch.float64)
    scores = draft_logits(hidden, DraftHead.of(model, ids))
    torch.testing.assert_close(scores, Target(model).head(hidden)[..., ids], rtol=1e-12, atol=1e-12)
    plain = F.linear(hidden, model.get_output_embeddings().weight[ids])
    assert (name == "llama") == torch.allclose(scores, plain), "the case must show what it is about"


def test_a_scale_keeps_the_dtype_of_the_head():
    model, ids = scoring_model("granite", torch.bfloat16), torch.tensor([3, 50, 96])
    head = DraftHead.of(model, ids)
    assert head.weight.dtype == torch.bfloat16
    assert torch.equal(head.weight.float(), model.get_output_embeddings().weight[ids].float() / 8)
