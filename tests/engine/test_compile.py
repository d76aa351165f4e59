"""The compiled pass against its plain twin (slow: inductor takes its time)."""

import functools

import pytest
import torch
from kit import DECODING, fresh_model, hooks, prompts, ragged_prompts, reference, scripted, tiny_model, uneven

import treedec
from treedec import Target, UnsupportedModel

pytestmark = pytest.mark.slow


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


def test_a_short_and_a_long_text_share_one_compilation():
    """The cache of a short text must not be as long as its mask, or the compiler takes the two lengths for one."""
    model = tiny_model()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    target = Target(model, compile=True)
    for new in (12, 90):
        expected = reference(model, prompts(), max_new_tokens=new, do_sample=False)
        for drafter in ("last-branch", "adversary"):
            ours = treedec.generate(target, prompts(), scripted(expected, drafter), max_new_tokens=new, do_sample=False)
            assert torch.equal(ours, expected.ids)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
