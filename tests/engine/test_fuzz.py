"""Random calls of `generate` with random drafts: the tokens and the random state of `model.generate`, whatever the mix.

The other tests take one thing at a time; here hypothesis combines architectures, ragged batches, warpers, processors,
ends, limits and trees, and shrinks what differs to the least combination that does.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kit import VOCAB, ragged_prompts, reference, syllables, tiny_model
from transformers import LogitsProcessor, StoppingCriteria

import treedec
from treedec import Draft, Drafter, DraftSession, TokenTree

# In float64, transformers' eager attention turns the padding of a ragged prompt into NaN (its softmax is float32).
DTYPES = {"llama": torch.float64, "mistral": torch.float64, "gpt2": torch.float64, "gemma2": torch.float32}


class RandomTrees(Drafter):
    """Trees of random shape that know the right continuation and mostly, but not always, draft it somewhere.

    Args:
        seed: decides everything.
        continuations: per row, the tokens of the reference after the prompt.
        prompt_lengths: per row, without padding.
        depth: levels below the root.
        width: most children of a node.
        right: probability that a node on the right path has the right token among its children.
    """

    name = "random"

    def __init__(self, seed, continuations, prompt_lengths, depth, width, right):
        self.seed, self.continuations, self.prompt_lengths = seed, continuations, prompt_lengths
        self.depth, self.width, self.right, self.max_nodes = depth, width, right, 24

    def start(self, target, batch, capacity):
        return RandomTreesSession(self)


class RandomTreesSession(DraftSession):
    def __init__(self, plan):
        self.plan, self.dice = plan, random.Random(plan.seed)

    def propose(self, state):
        rows = [
            ([], []) if text is None else self.grow(row, text, state.room[row], min(state.budget, self.plan.max_nodes))
            for row, text in enumerate(state.texts)
        ]
        return Draft(TokenTree.from_rows(rows))

    def grow(self, row, text, room, most):
        plan, dice = self.plan, self.dice
        upcoming = plan.continuations[row][len(text) - plan.prompt_lengths[row] :]
        tokens, parents, level = [text[-1]], [-1], [(0, True)]
        for depth in range(min(room, plan.depth)):
            below = []
            for parent, on_the_way in level:
                children = [dice.randrange(VOCAB) for _ in range(dice.randrange(plan.width + 1))]
                if on_the_way and depth < len(upcoming) and dice.random() < plan.right:
                    # Anywhere among its siblings, and sometimes twice: then the first one counts.
                    for _ in range(dice.choice([1, 1, 2])):
                        children.insert(dice.randrange(len(children) + 1), upcoming[depth])
                for token in children[: most - len(tokens)]:
                    below.append((len(tokens), on_the_way and upcoming[depth : depth + 1] == [token]))
                    tokens.append(token)
                    parents.append(parent)
            level = below
        return tokens, parents


class BansAnOldToken(LogitsProcessor):
    """Has a memory, differs from row to row and writes in place."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        for row in range(len(scores)):
            scores[row, input_ids[row, -1 - (self.calls + row) % input_ids.shape[1]]] = -torch.inf
        return scores


class EndsAt(StoppingCriteria):
    """Ends the rows in which one of these tokens has just been generated."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


TOKENIZER = syllables()


@dataclass(frozen=True)
class Call:
    """One random call, `arguments` without what holds state, and how to draft for it."""

    architecture: str
    lengths: list[int]
    arguments: dict[str, Any]
    bans: bool
    ends: str
    places: list[int]
    pad_is_eos: bool
    drafts: dict[str, Any]

    def own_arguments(self, unending: list[list[int]]) -> dict[str, Any]:
        """Fresh processors, and ends that really occur in the unending text."""
        last = [unending[row % len(unending)][place % len(unending[0])] for row, place in enumerate(self.places)]
        given: dict[str, Any] = {"logits_processor": [BansAnOldToken()]} if self.bans else {}
        if self.ends == "eos":
            given |= {"eos_token_id": last, "pad_token_id": last[0] if self.pad_is_eos else 0}
        if self.ends == "criterion":
            given["stopping_criteria"] = [EndsAt(last)]
        if self.ends == "criterion and eos":
            given |= {"stopping_criteria": [EndsAt(last)], "eos_token_id": last[:1], "pad_token_id": 0}
        if self.ends == "string":
            place = self.places[0] % len(unending[0])
            text = TOKENIZER.decode(unending[0][place : place + 2])
            given |= {"stop_strings": [text[1:-1] or text], "tokenizer": TOKENIZER}
        return given


def optional(name, values):
    return st.one_of(st.just({}), values.map(lambda value: {name: value}))


def merged(*strategies):
    return st.tuples(*strategies).map(lambda parts: {name: value for part in parts for name, value in part.items()})


sampling = merged(
    st.just({"do_sample": True}),
    st.sampled_from([{"top_k": 0}, {"top_k": 1}, {"top_k": 7}]),
    optional("temperature", st.sampled_from([0.3, 0.8, 1.5])),
    optional("top_p", st.sampled_from([0.5, 0.9])),
    optional("min_p", st.just(0.05)),
    optional("num_return_sequences", st.just(2)),
)
shaping = merged(
    optional("repetition_penalty", st.sampled_from([0.8, 1.4])),
    optional("no_repeat_ngram_size", st.sampled_from([1, 2, 3])),
    optional("bad_words_ids", st.just([[11], [6, 11], [41, 25, 12]])),
    optional("suppress_tokens", st.just([6, 41])),
    optional("min_new_tokens", st.integers(1, 12)),
    optional("sequence_bias", st.just([[[11], 2.0], [[6, 25], -4.0]])),
    optional("encoder_repetition_penalty", st.just(1.3)),
    optional("prefill_chunk_size", st.integers(1, 6)),
)
calls = st.builds(
    Call,
    architecture=st.sampled_from(list(DTYPES)),
    lengths=st.lists(st.sampled_from([9, 12, 5, 8, 2, 1, 14]), min_size=1, max_size=3),
    arguments=merged(
        st.one_of(st.just({"do_sample": False}), sampling),
        shaping,
        st.sampled_from([20, 15, 11, 7, 4, 2, 1]).map(lambda new: {"max_new_tokens": new}),
    ),
    bans=st.booleans(),
    ends=st.sampled_from(["length", "eos", "criterion", "criterion and eos", "string"]),
    places=st.lists(st.sampled_from([12, 9, 7, 5, 3, 2, 1, 0]), min_size=1, max_size=4),
    pad_is_eos=st.booleans(),
    drafts=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32),
            "depth": st.sampled_from([4, 3, 2, 6, 1]),
            "width": st.sampled_from([1, 0, 2, 3]),
            "right": st.sampled_from([1.0, 0.9, 0.7, 0.0]),
        }
    ),
)


def check(call):
    model, (ids, mask) = tiny_model(call.architecture, DTYPES[call.architecture]), ragged_prompts(tuple(call.lengths))
    arguments = {"attention_mask": mask, **call.arguments}
    unending = reference(model, ids, **arguments).new
    expected = reference(model, ids, **arguments, **call.own_arguments(unending))
    lengths = mask.repeat_interleave(call.arguments.get("num_return_sequences", 1), dim=0).sum(1).tolist()
    drafter = RandomTrees(continuations=expected.new, prompt_lengths=lengths, **call.drafts)
    torch.manual_seed(7)
    out = treedec.generate(
        model, ids, drafter, return_dict_in_generate=True, **arguments, **call.own_arguments(unending)
    )
    assert torch.equal(out.sequences, expected.ids)
    assert torch.equal(torch.get_rng_state(), expected.rng_state)
    event(f"tokens a pass: {round(out.stats.mean_accepted_length)}")
    event(f"ends by {call.ends}")


@given(calls)
@settings(max_examples=150)
def test_a_random_call_with_random_drafts_equals_generate(call):
    check(call)


@pytest.mark.slow
@given(calls)
@settings(max_examples=2000)
def test_many_random_calls_with_random_drafts_equal_generate(call):
    check(call)
