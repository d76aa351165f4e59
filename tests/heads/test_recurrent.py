"""The recurrent head: its trees against a plain reading of every path, and its state against a fresh start."""

import dataclasses

import pytest
import torch
from kit import DECODING, VOCAB, fresh_model, prompts, ragged_prompts, reference, tiny_model

import treedec
from treedec import Drafter, Drafting, DraftState
from treedec.growth import DynamicTree
from treedec.heads.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentHead

NEW = 30
IDS = torch.arange(1, VOCAB, 2)


def random_head(model, features=(), state_size=16, draft_ids=None, seed=0, **sizes):
    ids = torch.arange(VOCAB) if draft_ids is None else draft_ids
    head = RecurrentHead(RecurrentConfig(32, VOCAB, state_size, 24, len(ids), features, **sizes), ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3, generator=generator)
    return head.to(model.dtype)


def plain(head, model, features, path):
    """`[Vd]` logits after a path that begins with the root, written out for one vector at a time."""
    w = head.state_dict()

    def normed(x, weight):
        return x / torch.sqrt((x * x).mean() + 1e-6) * weight

    s = w["first.weight"] @ features
    for token in path:
        e = model.get_input_embeddings().weight[token]
        x = torch.cat([normed(s, w["state_norm.weight"]), normed(e, w["embedding_norm.weight"])])
        gate = w["gate.weight"] @ x
        s = s + w["down.weight"] @ (gate * torch.sigmoid(gate) * (w["up.weight"] @ x))
    h = normed(s, w["norm.weight"])
    if "project.weight" in w:
        h = w["project.weight"] @ h
    logits = model.get_output_embeddings().weight[w["draft_ids"]] @ h
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def state_for(texts, hidden, features):
    return DraftState(
        texts=texts, hidden=hidden, features=features, room=[0 if text is None else 9 for text in texts], budget=64,
        drafting=Drafting.TOP, shape=lambda logits: logits, noise=None, chance=None,
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(("features", "state_size"), [((), 16), ((0, 1), 16), ((1,), 32)])
def test_every_node_of_a_tree_is_scored_as_a_plain_reading_of_its_path(name, features, state_size):
    model = tiny_model(name)
    head = random_head(model, features, state_size, IDS)
    drafter = RecurrentDrafter(
        head, model, DynamicTree(nodes=24, depth=4, width=3, branching=3, min_probability=0.0, min_reach=0.0)
    )
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 32, generator=generator, dtype=torch.float64)
    new = [
        torch.randn(length, 32 * len(features), generator=generator, dtype=torch.float64) if features else None
        for length in (4, 1, 2)
    ]
    session = drafter.start(treedec.Target(model), 3, 64)
    calls = watch(session)
    tree = session.propose(state_for([[3, 5], None, [8, 2]], hidden, [new[0], None, new[2]])).tree
    assert tree.counts.tolist() == [24, 0, 24] and int(tree.depths.max()) == 4
    assert len(calls) == 4
    for row, root in ((0, 5), (2, 2)):
        known = hidden[row] if not features else torch.cat([hidden[row], new[row][-1]])
        for paths, logits in calls:
            for node, path in enumerate(paths[row]):
                wanted = plain(head, model, known, [root, *path])
                torch.testing.assert_close(logits[row, node], wanted, atol=1e-9, rtol=0)


def watch(session):
    """Keeps what a session says: per call the paths below the root, `[B][n]`, and the logits `[B, n, Vd]`."""
    calls, paths = [], []
    begin, expand = session.begin, session.expand

    def watched_begin(state):
        calls.clear()
        paths[:] = [[] for _ in state.texts]
        logits = begin(state)
        calls.append(([[()]] * len(state.texts), logits[:, None]))
        return logits

    def watched_expand(tokens, parents):
        new = [
            [(*(paths[row][parent] if parent >= 0 else ()), token) for token, parent in zip(*pair, strict=True)]
            for row, pair in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
        ]
        paths[:] = [before + more for before, more in zip(paths, new, strict=True)]
        logits = expand(tokens, parents)
        calls.append((new, logits))
        return logits

    session.begin, session.expand = watched_begin, watched_expand
    return calls


@torch.no_grad()
def test_reading_known_texts_is_what_drafting_does():
    model = tiny_model()
    head = random_head(model, (1,))
    features, tokens = torch.randn(5, 64, dtype=torch.float64), torch.randint(VOCAB, (3, 5))
    outputs = head(features, model.get_input_embeddings().weight[tokens])
    assert outputs.shape == (3, 5, 32)
    for place in range(5):
        for depth in range(3):
            wanted = plain(head, model, features[place], tokens[: depth + 1, place].tolist())
            torch.testing.assert_close(model.lm_head(outputs[depth, place]), wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("features", [(), (0, 1)])
@pytest.mark.parametrize("decoding", ["greedy", "T=1.0", "top_p"])
def test_random_heads_leave_the_tokens_of_a_ragged_batch_alone(features, decoding):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, **DECODING[decoding]}
    free = reference(model, ids, **arguments)
    for more in ({}, {"eos_token_id": free.new[1][8], "pad_token_id": 0}):
        expected = reference(model, ids, **arguments, **more)
        drafter = RecurrentDrafter(
            random_head(model, features, draft_ids=IDS), model, DynamicTree(min_probability=0.0, min_reach=0.0)
        )
        torch.manual_seed(7)
        assert torch.equal(treedec.generate(model, ids, drafter, **arguments, **more), expected.ids)
        assert torch.equal(torch.get_rng_state(), expected.rng_state)


class Spied(Drafter):
    """Drafts as another does, half of the time from a target-made chain; keeps every state and tree."""

    def __init__(self, other):
        self.other, self.name, self.max_nodes, self.features = other, other.name, other.max_nodes, other.features
        self.seen = []

    def start(self, target, batch, capacity):
        session, propose = self.other.start(target, batch, capacity), None
        propose = session.propose

        def spied(state):
            draft = propose(state)
            self.seen.append((state, draft.tree))
            return draft

        session.propose = spied
        return session


def test_trees_depend_on_the_committed_text_alone():
    """What a session drafts after any history of acceptance is what a fresh one drafts from the whole text."""
    model, (ids, mask) = tiny_model(), ragged_prompts()
    drafter = RecurrentDrafter(random_head(model, (1,)), model, DynamicTree(nodes=48, depth=3, branching=16, width=3))
    drafter.growth = dataclasses.replace(drafter.growth, min_probability=0.0)
    spied = Spied(drafter)
    out = treedec.generate(
        model, ids, spied, attention_mask=mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert len(out.stats.accepted_lengths) > 1  # so drafts were accepted and rejected
    shown = [[] for _ in ids]
    for state, tree in spied.seen:
        for row, new in enumerate(state.features):
            if new is not None:
                shown[row].append(new)
        whole = [None if new is None else torch.cat(parts) for new, parts in zip(state.features, shown, strict=True)]
        fresh = drafter.start(treedec.Target(model), len(ids), 99).propose(dataclasses.replace(state, features=whole))
        assert torch.equal(fresh.tree.counts, tree.counts)
        for row, count in enumerate(tree.counts.tolist()):
            assert torch.equal(fresh.tree.tokens[row, :count], tree.tokens[row, :count])
            assert torch.equal(fresh.tree.parents[row, :count], tree.parents[row, :count])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="state_size must be at least 1"):
        RecurrentConfig(32, VOCAB, 0, 8, 8)
    with pytest.raises(ValueError, match="exceeds the target's 97"):
        RecurrentConfig(32, VOCAB)
    with pytest.raises(ValueError, match="ascending ids"):
        random_head(tiny_model(), draft_ids=torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="input of decoder layer 2, but the target has 2"):
        RecurrentDrafter(random_head(tiny_model(), (2,)), tiny_model(), DynamicTree())
    with pytest.raises(ValueError, match="belong to another model"):
        RecurrentDrafter(random_head(tiny_model()), fresh_model(vocab_size=64), DynamicTree())
    drafter = RecurrentDrafter(random_head(tiny_model()), tiny_model(), DynamicTree())
    with pytest.raises(ValueError, match="loaded for another model"):
        treedec.generate(fresh_model(vocab_size=64), prompts() % 64, drafter, max_new_tokens=4)


def test_a_shape_survives_json():
    config = RecurrentConfig(32, VOCAB, 16, 24, 50, (0, 1))
    assert RecurrentConfig(**(dataclasses.asdict(config) | {"features": [0, 1]})) == config
