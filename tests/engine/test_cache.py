"""SlotCache: who gets which slot, and that what is visible is what a fresh prefill would have cached (A13)."""

import gc
import weakref

import pytest
import torch
from kit import (
    DRAFTERS,
    check_visible_states,
    decoder,
    fresh_prefill,
    prompts,
    ragged_prompts,
    reference,
    scripted,
    tiny_model,
    uneven,
)

import treedec
from treedec.cache import SlotCache

CPU = torch.device("cpu")


def write(cache, positions, layer=0, keys=None):
    """A pass that writes, as key and value of each node, its position (or `keys`)."""
    cache.reserve(torch.tensor(positions))
    states = torch.tensor(keys or positions, dtype=torch.float64)[:, None, :, None]  # [B, 1, N, 1]
    return cache.layers[layer].update(states, -states)


def keys(cache, row=0):
    return cache.visible_states(0, row)[0].flatten().tolist()


def test_accepted_slots_stay_and_rejected_ones_are_handed_out_again():
    cache = SlotCache(1, 1, 8, CPU, granularity=4)
    write(cache, [[0, 1, 1, 2]], keys=[[10, 11, 12, 13]])
    cache.commit(torch.tensor([[True, False, True, False]]))
    assert cache.lengths == [2] and keys(cache) == [10, 12]
    write(cache, [[2, 3, 3]], keys=[[20, 21, 22]])
    assert cache.slots.tolist() == [[1, 3, 4]]
    cache.commit(torch.tensor([[True, False, True]]))
    assert cache.lengths == [4] and keys(cache) == [10, 12, 20, 22]
    assert cache.visible_states(0, 0)[1].flatten().tolist() == [-10, -12, -20, -22]


def test_states_come_in_the_order_of_positions_not_of_slots():
    cache = SlotCache(1, 1, 8, CPU)
    write(cache, [[0, 1, 1]], keys=[[10, 11, 12]])
    cache.commit(torch.tensor([[True, False, True]]))  # position 1 in slot 2, and slot 1 free
    write(cache, [[2]], keys=[[20]])
    cache.commit(torch.tensor([[True]]))
    assert cache.slots.tolist() == [[1]] and keys(cache) == [10, 12, 20]


def test_rows_advance_at_their_own_pace():
    cache = SlotCache(1, 2, 8, CPU)
    write(cache, [[0, 1], [0, 1]], keys=[[10, 11], [30, 31]])
    cache.commit(torch.tensor([[True, True], [True, False]]))
    write(cache, [[2, 3], [1, 2]], keys=[[12, 13], [41, 42]])
    assert cache.slots.tolist() == [[2, 3], [1, 2]]
    cache.commit(torch.tensor([[False, False], [True, True]]))
    assert cache.lengths == [2, 3] and keys(cache, 0) == [10, 11] and keys(cache, 1) == [30, 41, 42]


def test_a_pass_that_does_not_fit_is_refused_and_one_that_just_fits_is_not():
    cache = SlotCache(1, 2, 5, CPU)
    write(cache, [[0, 1, 2], [0, 1, 2]])
    cache.commit(torch.tensor([[True, False, False], [True, True, True]]))
    assert cache.free == 2
    with pytest.raises(ValueError, match="3 nodes does not fit: 2 of 5 slots"):
        cache.reserve(torch.zeros(2, 3, dtype=torch.long))
    write(cache, [[1, 2], [3, 4]])


def test_rollback_hides_what_lies_beyond_and_frees_its_slots():
    cache = SlotCache(1, 2, 8, CPU)
    write(cache, [[0, 1, 2], [0, 1, 2]], keys=[[10, 11, 12], [30, 31, 32]])
    cache.commit(torch.ones(2, 3, dtype=torch.bool))
    cache.rollback([1, 5])
    assert cache.lengths == [1, 3] and keys(cache, 0) == [10] and keys(cache, 1) == [30, 31, 32]
    write(cache, [[1], [3]], keys=[[21], [33]])
    cache.commit(torch.ones(2, 1, dtype=torch.bool))
    assert keys(cache, 0) == [10, 21] and keys(cache, 1) == [30, 31, 32, 33]


def test_attention_ends_at_the_high_water_mark_rounded_up_and_capped():
    cache = SlotCache(1, 1, 10, CPU, granularity=4)
    lengths = []
    for positions in ([[0]], [[0, 1, 2, 3]], [[0, 1, 2, 3, 4]], [[0]], [list(range(9))]):
        returned, _ = write(cache, positions)
        lengths.append(returned.shape[2])
    assert lengths == [4, 4, 8, 8, 10]


# Not mistral, whose own cache forgets what left the window.
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "phi3", "qwen3"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a13_after_every_round_the_cache_equals_a_fresh_prefill(architecture, drafter):
    model = tiny_model(architecture)
    expected = reference(model, prompts(), max_new_tokens=16, do_sample=False)
    decoding = decoder(model, prompts(), scripted(expected, drafter), max_new_tokens=16)
    rounds = 0
    for _ in decoding.run():
        check_visible_states(model, decoding)
        rounds += 1
    assert rounds > 3 and decoding.rows.texts[0] == expected.ids[0].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a13_rows_of_a_ragged_batch_equal_their_own_prefill_after_every_round(architecture):
    model, (ids, mask) = tiny_model(architecture), ragged_prompts()
    expected = reference(model, ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    decoding = decoder(model, ids, uneven(expected, mask), max_new_tokens=20, attention_mask=mask)
    paces = set()
    for block in decoding.run():
        check_visible_states(model, decoding)
        paces.add(tuple(len(tokens) for tokens in block.tokens))
    assert len(decoding.held) < len(ids), "rows should have finished at different rounds"
    assert any(len(set(pace)) > 1 for pace in paces), "the rows should have advanced unevenly"


def test_a13_what_leaves_a_window_is_still_there_for_the_tree():
    model = tiny_model("mistral")
    expected = reference(model, prompts(length=30), max_new_tokens=16, do_sample=False)
    decoding = decoder(model, prompts(length=30), scripted(expected, "last-branch"), max_new_tokens=16)
    for _ in decoding.run():
        text = decoding.rows.texts[0][:-1]
        for layer, (k, v) in enumerate(fresh_prefill(model, text)):
            ours_k, ours_v = decoding.cache.visible_states(layer, 0)
            assert ours_k.shape[1] == len(text)
            torch.testing.assert_close(ours_k[:, -k.shape[1] :], k, atol=1e-11, rtol=0)
            torch.testing.assert_close(ours_v[:, -v.shape[1] :], v, atol=1e-11, rtol=0)


def test_a_cache_grows_when_it_has_to_and_not_before():
    small, whole = SlotCache(1, 2, 40, CPU, granularity=4, at_once=4), SlotCache(1, 2, 40, CPU, granularity=4)
    allocated = []
    for round_ in range(6):
        for cache in (small, whole):
            place = 3 * round_
            write(cache, [[place, place + 1, place + 2, place + 1]] * 2, keys=[[place, 1, 2, 3], [place + 50, 4, 5, 6]])
            cache.commit(torch.tensor([[True, True, True, False], [True, True, False, round_ % 2 == 0]]))
        assert [keys(small, row) for row in (0, 1)] == [keys(whole, row) for row in (0, 1)]
        allocated.append(small.allocated)
    assert allocated[0] == 4 and allocated[-1] == 32 and whole.allocated == 40


def test_a_distant_cap_on_the_length_costs_nothing():
    model = tiny_model()
    ids, arguments = prompts(), {"max_new_tokens": 10**9, "do_sample": False, "pad_token_id": 0}
    ends = reference(model, ids, max_new_tokens=9, do_sample=False).new[0][-1]
    expected = reference(model, ids, eos_token_id=ends, **arguments)
    out = treedec.generate(model, ids, scripted(expected, "last-branch"), eos_token_id=ends, **arguments)
    assert torch.equal(out, expected.ids)


def test_a_tree_that_is_drafted_level_by_level_keeps_the_slots_of_its_earlier_levels():
    cache = SlotCache(1, 1, 16, CPU, granularity=4)
    write(cache, [[0, 1, 1]], keys=[[10, 11, 12]])
    cache.commit(torch.tensor([[True, False, True]]))  # slot 1 is free
    write(cache, [[2, 3]], keys=[[20, 21]])
    assert cache.slots.tolist() == cache.flight.tolist() == [[1, 3]]
    cache.reserve(torch.tensor([[3, 4]]), keep=2)
    cache.layers[0].update(*[torch.tensor([[[[30.0], [31.0]]]], dtype=torch.float64)] * 2)
    assert cache.slots.tolist() == [[4, 5]] and cache.flight.tolist() == [[1, 3, 4, 5]]
    assert cache.layers[0].keys[0, 0, :6, 0].tolist() == [10, 20, 12, 21, 30, 31]
    write(cache, [[2]], keys=[[40]])
    assert cache.slots.tolist() == [[1]] and keys(cache) == [10, 12]


def test_keys_and_values_are_freed_with_their_cache():
    """Not when the garbage collector comes by, which does not see how large they are."""
    cache = SlotCache(2, 1, 8, torch.device("cpu"))
    cache.reserve(torch.tensor([[0, 1]]))
    for layer in range(2):
        cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), layer)
    buffers = [weakref.ref(tensor) for layer in cache.layers for tensor in (layer.keys, layer.values)]
    gc.disable()
    try:
        del cache, layer
        assert len(buffers) == 4 and not any(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()
