"""The code in docs/drafters.md does what the page says."""

import re
from pathlib import Path

import pytest
import torch
from kit import DECODING, prompts, ragged_prompts, reference, tiny_model

import treedec

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


@pytest.fixture(scope="module")
def page():
    """Everything that the blocks of the page define, run one after the other with a tiny model."""
    names = {"model": tiny_model(), "input_ids": prompts()}
    torch.manual_seed(7)
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_examples_return_the_tokens_of_generate(page):
    model, ids = tiny_model(), prompts()
    assert torch.equal(page["output"].sequences, reference(model, ids, max_new_tokens=40, do_sample=False).ids)
    assert torch.equal(page["ids"], reference(model, ids, max_new_tokens=40, do_sample=True).ids)


@pytest.mark.parametrize("name", ["LastSeen", "TwoSeen"])
def test_the_drafters_of_the_page_are_exact_on_ragged_batches(page, name):
    model, (ids, mask) = tiny_model(), ragged_prompts()
    for decoding in ("greedy", "T=0.7"):
        arguments = {"attention_mask": mask, "max_new_tokens": 60, **DECODING[decoding]}
        eos = reference(model, ids, **arguments).new[1][30]
        arguments |= {"eos_token_id": eos, "pad_token_id": 0}
        ours = treedec.generate(model, ids, page[name](), seed=7, **arguments)
        assert torch.equal(ours, reference(model, ids, **arguments).ids)


def test_the_drafter_of_the_page_drafts_what_it_says(page):
    text = [1, 2, 3, 1, 4, 1]
    state = treedec.DraftState(
        texts=[text, None], hidden=None, features=[None, None], room=[8, 0], budget=64,
        drafting=treedec.Drafting.TOP, shape=None, noise=None, chance=None,
    )  # fmt: skip
    assert page["LastSeen"]().start(None, 2, 100).propose(state).tree.tokens.tolist()[0] == [1, 4, 1, 4, 1]
    assert page["TwoSeen"]().start(None, 2, 100).propose(state).tree.tokens.tolist()[0] == [1, 4, 2]


def test_the_smallest_drafter_takes_no_more_than_thirty_lines():
    first = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[1]
    assert len([line for line in first.splitlines() if line.strip()]) <= 30
