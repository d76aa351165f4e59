"""Token equality on a CUDA device, where noise, cache and masks live away from the trees."""

import pytest
import torch
from kit import DECODING, DRAFTERS, fresh_model, prompts, ragged_prompts, reference, scripted, uneven

import treedec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("decoding", DECODING)
def test_tokens_equal_generate(decoding):
    model, ids = fresh_model().to("cuda"), prompts().to("cuda")
    arguments = {"max_new_tokens": 30, **DECODING[decoding]}
    expected = reference(model, ids, **arguments)
    after = torch.cuda.get_rng_state()
    for name in DRAFTERS:
        torch.manual_seed(7)
        assert torch.equal(treedec.generate(model, ids, scripted(expected, name), **arguments), expected.ids)
        assert torch.equal(torch.cuda.get_rng_state(), after)


def test_a11_a_ragged_batch_equals_generate():
    model = fresh_model().to("cuda")
    ids, mask = (tensor.to("cuda") for tensor in ragged_prompts())
    arguments = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": True, "top_k": 0}
    expected = reference(model, ids, **arguments)
    torch.manual_seed(7)
    assert torch.equal(treedec.generate(model, ids, uneven(expected, mask), **arguments), expected.ids)
