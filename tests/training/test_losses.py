"""The loss of drafts against its plain twin, its gradient, and what it supervises (A21)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import run_numbers, runs_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, LlamaForCausalLM

from treedec.target import Target
from treedec.training.contracts import Batch
from treedec.training.losses import DraftHead, distillation, draft_logits, text_ranks

DEPTHS, HIDDEN, DRAFT = 3, 8, 13
# Two adjacent runs, the second up to the end of its row; a run from the first position, one that supervises nothing and
# one before padding; no run; one long run. So runs end where rows end and begin where rows begin.
LENGTHS = [12, 10, 12, 12]
RESPONSES = [[(3, 8), (8, 13)], [(0, 3), (6, 7), (7, 10)], [], [(1, 11)]]


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def problem(lengths=LENGTHS, responses=RESPONSES, dtype=torch.float64, bias=False, cap=None, every_row=False, offset=1):
    """States at the supervised positions, or at all, and what they are taught by."""
    runs = run_numbers(lengths, responses)
    size = runs.shape
    batch = Batch(torch.zeros(size, dtype=torch.long), torch.tensor(lengths), runs, random(*size, HIDDEN, dtype=dtype))
    wanted = torch.ones(size, dtype=torch.bool) if every_row else batch.supervised(offset)
    rows = wanted.flatten().nonzero()[:, 0]
    weight, shift = random(DRAFT, HIDDEN, seed=1, dtype=dtype), random(DRAFT, seed=2, dtype=dtype)
    head = DraftHead(weight, shift if bias else None, cap)
    return random(DEPTHS, len(rows), HIDDEN, seed=3, dtype=dtype), rows, batch, head


def labels_of(batch):
    """A token after every position; every fourth one cannot be drafted."""
    text = torch.randint(DRAFT, (batch.runs.numel(),), generator=torch.Generator().manual_seed(4))
    text[::4] = -1
    return text


def scores(head, state):
    z = head.weight @ state + (0 if head.bias is None else head.bias)
    return z if head.cap is None else head.cap * (z / head.cap).tanh()


def lessons(batch, depth, offset):
    """Pairs of flattened positions, reader and teacher, run by run: the definition."""
    width, pairs = batch.runs.shape[1], []
    for run in runs_of(batch):
        places = [row * width + column for row, column in run]
        pairs += [(p, p + offset + depth) for p in places if p + offset + depth in places]
    return pairs


def plain(states, rows, batch, head, offset, text):
    hidden, place = batch.hidden.flatten(0, 1), {row: i for i, row in enumerate(rows.tolist())}
    sums, hits, counts = [], [], []
    for depth in range(len(states)):
        total, right, seen = states.new_zeros(()), 0, 0
        for reader, teacher in lessons(batch, depth, offset):
            if text is not None and text[teacher] < 0:
                continue
            log_q = scores(head, states[depth, place[reader]]).log_softmax(-1)
            p = scores(head, hidden[teacher]).softmax(-1)
            if text is None:
                total = total + F.kl_div(log_q, p, reduction="sum")
            else:
                total = total + F.cross_entropy(log_q[None], text[teacher][None])
            right, seen = right + int(log_q.argmax() == p.argmax()), seen + 1
        sums.append(total)
        hits.append(right)
        counts.append(seen)
    return torch.stack(sums), hits, counts


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, None), (False, 2.0), (True, 2.0)])
@pytest.mark.parametrize("every_row", [False, True])
def test_loss_and_gradient_equal_the_plain_twin(block, offset, hard, bias, cap, every_row):
    states, rows, batch, head = problem(bias=bias, cap=cap, every_row=every_row, offset=offset)
    # Some right drafts among the wrong ones.
    states[:, ::3] = 3 * batch.hidden.flatten(0, 1).roll(-offset, 0)[rows[::3]]
    text = labels_of(batch) if hard else None
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    mine, theirs = states.clone().requires_grad_(), states.clone().requires_grad_()
    losses = distillation(mine, rows, batch, head, offset=offset, text=text, block=block)
    expected, hits, counts = plain(theirs, rows, batch, head, offset, text)
    torch.testing.assert_close(losses.sums, expected, rtol=1e-12, atol=1e-12)
    assert losses.hits.tolist() == hits and losses.counts.tolist() == counts and losses.extra is None
    assert 0 < sum(hits) < sum(counts) and min(counts) > 0, "the case must have both right and wrong drafts"
    (weights * losses.sums).sum().backward()
    (weights * expected).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_gradcheck(hard, cap):
    states, rows, batch, head = problem([7, 5], [[(2, 7)], [(1, 4)]], bias=True, cap=cap)
    text = labels_of(batch) if hard else None

    def loss(x):
        return distillation(x, rows, batch, head, text=text, block=3).sums

    assert torch.autograd.gradcheck(loss, (states.requires_grad_(),))


@pytest.mark.parametrize("offset", [0, 1])
def test_perfect_states_cost_nothing_at_their_own_offset_only(offset):
    _, rows, batch, head = problem([20], [[(1, 20)]], every_row=True)
    for shift in range(DEPTHS + 2):
        states = batch.hidden[0].roll(-shift, 0).expand(DEPTHS, -1, -1)  # what is right `shift` positions later
        sums = distillation(states, rows, batch, head, offset=offset).sums
        for depth in range(DEPTHS):
            assert abs(float(sums[depth])) < 1e-12 if depth + offset == shift else float(sums[depth]) > 1


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_only_positions_of_the_same_run_teach_and_are_taught(offset, hard):
    """Not prompts, padding, other responses or other rows: they hold garbage, and nothing changes."""
    states, rows, batch, head = problem(every_row=True)
    text = labels_of(batch) if hard else None

    def measured(states, hidden):
        states = states.clone().requires_grad_()
        losses = distillation(states, rows, replace(batch, hidden=hidden), head, offset=offset, text=text)
        losses.sums.sum().backward()
        return losses.sums.detach(), states.grad

    before = measured(states, batch.hidden)
    pairs = [lessons(batch, depth, offset) for depth in range(DEPTHS)]
    teachers = sorted({teacher for pair in pairs for _, teacher in pair})
    garbage = torch.full_like(batch.hidden, 1e3).flatten(0, 1)
    garbage[teachers] = batch.hidden.flatten(0, 1)[teachers]
    noise = torch.full_like(states, -1e3)
    for depth in range(DEPTHS):
        readers = [reader for reader, teacher in pairs[depth] if text is None or text[teacher] >= 0]
        noise[depth, readers] = states[depth, readers]
        assert (before[1][depth] != 0).any(-1).nonzero()[:, 0].tolist() == sorted(readers)
    after = measured(noise, garbage.view_as(batch.hidden))
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    if not hard:
        for teacher in teachers:
            changed = batch.hidden.clone().flatten(0, 1)
            changed[teacher] += 1
            assert not torch.equal(measured(states, changed.view_as(batch.hidden))[0], before[0])


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    ("lengths", "responses"),
    [([5, 3], [[], []]), ([5], [[(2, 3)]]), ([1], [[(0, 1)]]), ([6, 6], [[(2, 3), (3, 4)], [(6, 6)]])],
)
def test_a_batch_without_supervision_is_finite_and_zero(lengths, responses, hard):
    """A prompt alone; responses too short to teach a draft."""
    for every_row in (False, True):
        states, rows, batch, head = problem(lengths, responses, torch.float32, every_row=every_row)
        states.requires_grad_()
        losses = distillation(states, rows, batch, head, text=labels_of(batch) if hard else None)
        losses.sums.sum().backward()
        assert losses.sums.tolist() == [0] * DEPTHS == losses.counts.tolist() == losses.hits.tolist()
        assert states.grad is not None and not states.grad.any()


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_huge_logits_stay_finite(hard, cap):
    states, rows, batch, head = problem(dtype=torch.float32, cap=cap)
    states = (states * 1e4).requires_grad_()
    huge = replace(batch, hidden=batch.hidden * 1e4)
    losses = distillation(states, rows, huge, head, text=labels_of(batch) if hard else None)
    losses.sums.sum().backward()
    assert losses.sums.isfinite().all() and states.grad.isfinite().all() and (losses.sums > 0).all()


@pytest.mark.parametrize("hard", [False, True])
def test_bfloat16_follows_float32(hard):
    states, rows, batch, head = problem([64], [[(1, 64)]], torch.float32)
    narrow = DraftHead(head.weight.bfloat16())
    hidden, states = batch.hidden.bfloat16(), states.bfloat16().float()
    text = labels_of(batch) if hard else None
    exact, rounded = states.clone().requires_grad_(), states.clone().requires_grad_()
    wide = DraftHead(narrow.weight.float())
    a = distillation(exact, rows, replace(batch, hidden=hidden.float()), wide, text=text)
    b = distillation(rounded, rows, replace(batch, hidden=hidden), narrow, text=text)
    a.sums.sum().backward()
    b.sums.sum().backward()
    assert b.sums.dtype == rounded.grad.dtype == draft_logits(hidden, narrow).dtype == torch.float32
    torch.testing.assert_close(b.sums, a.sums, rtol=2e-2, atol=0)
    assert F.cosine_similarity(exact.grad.flatten(), rounded.grad.flatten(), dim=0) > 0.999


def test_autocast_around_it_changes_nothing():
    states, rows, batch, head = problem(dtype=torch.float32)
    plain, cast = states.clone().requires_grad_(), states.clone().requires_grad_()
    a = distillation(plain, rows, batch, head)
    with torch.autocast("cpu", torch.bfloat16):
        b = distillation(cast, rows, batch, head)
    a.sums.sum().backward()
    b.sums.sum().backward()
    assert torch.equal(a.sums, b.sums) and torch.equal(plain.grad, cast.grad)
    wide = replace(batch, hidden=batch.hidden.double())
    exact = distillation(states.double(), rows, wide, DraftHead(head.weight.double())).sums
    torch.testing.assert_close(a.sums.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("top", [1, 4, 100])
def test_ranks_of_the_texts_tokens_equal_those_of_a_sorted_list(block, offset, top):
    states, rows, batch, head = problem(bias=True, cap=2.0, every_row=True, offset=offset)
    text = labels_of(batch)
    ranks = text_ranks(states, rows, batch, head, text, top, offset=offset, block=block)
    expected = torch.full((DEPTHS, *batch.runs.shape), top)
    missing = 0
    for depth in range(DEPTHS):
        for reader, teacher in lessons(batch, depth, offset):
            order = scores(head, states[depth, reader]).argsort(descending=True).tolist()[:top]
            missing += int(text[teacher] < 0)
            if int(text[teacher]) in order:
                expected[depth].view(-1)[reader] = order.index(int(text[teacher]))
    assert torch.equal(ranks, expected)
    assert missing and (ranks == 0).any(), "the case must have tokens that cannot be drafted, and right ones"


def test_ranks_are_found_at_the_rows_given():
    """As a learner gives them: the states of the supervised positions only."""
    states, rows, batch, head = problem()
    text = labels_of(batch)
    everywhere = torch.zeros(DEPTHS, batch.runs.numel(), HIDDEN, dtype=torch.float64)
    everywhere[:, rows] = states
    wanted = text_ranks(everywhere, torch.arange(batch.runs.numel()), batch, head, text, 5)
    assert torch.equal(text_ranks(states, rows, batch, head, text, 5), wanted) and len(set(wanted.tolist()[0][0])) > 1


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
