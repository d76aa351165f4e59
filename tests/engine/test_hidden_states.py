"""What a drafter gets to read of the target: the hidden states of exactly the committed tokens, each one once."""

import pytest
import torch
from kit import fresh_model, prompts, ragged_prompts, reference, tiny_model, uneven

import treedec
from treedec import Drafter, DraftSession

NEW = 20


class Reads(Drafter):
    """Drafts as another drafter does, and keeps the features it was shown."""

    name = "reads"

    def __init__(self, other, features):
        self.other, self.features, self.max_nodes, self.seen = other, features, other.max_nodes, {}

    def start(self, target, batch, capacity):
        return _ReadsSession(self, self.other.start(target, batch, capacity))


class _ReadsSession(DraftSession):
    def __init__(self, plan, session):
        self.plan, self.session = plan, session

    def propose(self, state):
        for row, (text, new) in enumerate(zip(state.texts, state.features, strict=True)):
            if text is not None:
                self.plan.seen.setdefault(row, []).append(new)
                assert sum(len(part) for part in self.plan.seen[row]) == len(text) - 1
                self.plan.text = {**getattr(self.plan, "text", {}), row: text}
        return self.session.propose(state)


@torch.no_grad()
def expected_features(model, text, layers):
    head_input = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: head_input.append(given[0]))
    out = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    hook.remove()
    return torch.cat([out.hidden_states[layer][0] for layer in layers], -1) if layers else head_input[0][0]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("layers", [(), (1,), (0, 1)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
def test_features_are_those_of_the_committed_text(architecture, layers, chunk):
    model, (ids, mask) = tiny_model(architecture), ragged_prompts()
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = reference(model, ids, **arguments)
    drafter = Reads(uneven(expected, mask), layers)
    out = treedec.generate(model, ids, drafter, prefill_chunk_size=chunk, **arguments)
    assert torch.equal(out, expected.ids)
    for row, parts in drafter.seen.items():
        wanted = expected_features(model, drafter.text[row][:-1], layers)
        torch.testing.assert_close(torch.cat(parts), wanted, atol=1e-10, rtol=0)
    assert len({len(parts[1]) for parts in drafter.seen.values()}) > 1


def test_features_go_on_where_the_text_is_read_anew():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 4.0, 8.0]}

    def make():
        return fresh_model(
            "phi3", rope_parameters=rope, max_position_embeddings=80, original_max_position_embeddings=20
        )

    expected = reference(make(), prompts(), max_new_tokens=NEW, do_sample=False)
    drafter = Reads(uneven(expected), ())  # which checks that there is one feature for every token but the last
    out = treedec.generate(make(), prompts(), drafter, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected.ids) and len(drafter.text[0]) > 22


def test_drafters_that_read_no_features_get_none():
    drafter = Reads(uneven(reference(tiny_model(), prompts(), max_new_tokens=4, do_sample=False)), None)
    drafter.start = lambda target, batch, capacity: _Unread(drafter.other.start(target, batch, capacity))
    treedec.generate(tiny_model(), prompts(), drafter, max_new_tokens=4, do_sample=False)


class _Unread(DraftSession):
    def __init__(self, session):
        self.session = session

    def propose(self, state):
        assert state.features == [None]
        return self.session.propose(state)
