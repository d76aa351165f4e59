"""Pooled figures by hand; ratios and their intervals against planted differences and simulated runs."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from treedec.benchmarks import statistics
from treedec.benchmarks.results import Condition, Failure, Result, Row
from treedec.benchmarks.statistics import Estimate, Summary, is_slower, near_tie, pooled, speed, speed_ratio


def row(prompts="a", tokens=11, seconds=1.0, **more):
    """A row of one prompt, or of a batch of one-letter prompts, whose prefill took a tenth of its decoding."""
    plain = {
        "condition": 0, "round": 0, "category": "chat", "prompt_tokens": 5, "prefill_seconds": seconds / 10,
        "draft_seconds": None, "target_seconds": None, "passes": None, "nodes": None, "accepted_lengths": None,
        "acceptance_by_place": None, "digest": "", "matches": None, "first_difference": None, "logit_gap": None,
    }  # fmt: skip
    return Row(**{**plain, "prompts": tuple(prompts), "new_tokens": tokens, "decode_seconds": seconds, **more})


def simulated(seed, prompts=80, rounds=1, slowdown=1.0, methods=2, noise=0.03, timing=None):
    """Rows of some methods on the same prompts. Prompts differ in length and, method by method, in how fast they are.

    Args:
        seed: of the prompts.
        slowdown: factor on the seconds of the last method.
        noise: of the clock: standard deviation of the logarithm of the seconds of one row.
        timing: seed of the clock; another one is the same run repeated.
    """
    about, clock = np.random.default_rng(seed), np.random.default_rng([seed, timing or 0])
    lengths = about.integers(8, 129, prompts)
    paces = 0.02 * np.exp(about.normal(0, 0.02, prompts) + about.normal(0, 0.15, (methods, prompts)))
    paces[-1] *= slowdown
    seconds = np.exp(clock.normal(0, noise, (methods, rounds, prompts))) * paces[:, None] * (lengths - 1)
    return [
        [
            row([f"p{prompt}"], int(lengths[prompt]), float(seconds[method, turn, prompt]), round=turn)
            for turn in range(rounds)
            for prompt in range(prompts)
        ]
        for method in range(methods)
    ]


def test_figures_are_pooled():
    rows = [
        row("a", 9, 2.0, draft_seconds=0.5, target_seconds=1.0, passes=2, accepted_lengths={4: 2}, matches=True,
            acceptance_by_place={"1,1": (2, 2), "2,1": (2, 1)}),
        row("b", 11, 1.0, draft_seconds=0.2, target_seconds=0.7, passes=10, accepted_lengths={1: 10}, matches=False,
            first_difference=3, logit_gap=0.5, acceptance_by_place={"1,1": (10, 0), "1,10": (4, 1), "1,2": (4, 0)}),
        row("c", 1, 0.5, draft_seconds=0.0, target_seconds=0.0, passes=0, accepted_lengths={}, matches=False,
            first_difference=0, logit_gap=0.75),
    ]  # fmt: skip
    found = pooled(rows, near_tie("bfloat16"))
    assert (found.prompts, found.new_tokens, found.decoded_tokens, found.passes) == (3, 21, 18, 12)
    assert (found.prefill_seconds, found.decode_seconds) == (pytest.approx(0.35), 3.5)
    assert (found.draft_seconds, found.target_seconds, found.rest_seconds) == pytest.approx((0.7, 1.7, 1.1))
    assert found.mean_accepted_length == 18 / 12  # not (4 + 1) / 2
    assert found.accepted_lengths == {1: 10, 4: 2}
    assert list(found.acceptance_by_place.items()) == [
        ((1, 1), (12, 2)), ((1, 2), (4, 0)), ((1, 10), (4, 1)), ((2, 1), (2, 1)),
    ]  # fmt: skip
    assert (found.exact_match, found.near_ties) == (1 / 3, 1 / 2)
    assert speed(rows).value == pytest.approx(18 / 3.5)
    assert speed(rows, prefill=True).value == pytest.approx(21 / 3.85)


def test_what_a_prefill_yields_is_not_decoded():
    """transformers' assisted decoding accepts drafts in its pass over the prompt already."""
    rows = [row("a", 11, 2.0, passes=4, accepted_lengths={1: 2, 3: 2})]
    assert pooled(rows, 0.5).decoded_tokens == 8
    assert speed(rows).value == 4.0 and speed(rows, prefill=True).value == pytest.approx(5.0)


def test_what_some_row_does_not_know_is_unknown():
    known = row("a", draft_seconds=0.5, target_seconds=0.5, passes=10, accepted_lengths={1: 10}, matches=True)
    found = pooled([known, row("b")], 0.5)
    assert (found.draft_seconds, found.target_seconds, found.rest_seconds, found.passes) == (None, None, None, None)
    assert (found.accepted_lengths, found.mean_accepted_length, found.acceptance_by_place) == (None, None, None)
    assert (found.exact_match, found.near_ties, found.compared) == (1.0, None, 1)
    nothing = pooled([row("a", accepted_lengths={})], 0.5)
    assert (nothing.exact_match, nothing.near_ties, nothing.mean_accepted_length) == (None, None, None)
    with pytest.raises(ValueError, match="no rows"):
        pooled([], 0.5)


def test_batches_and_rounds_count_every_prompt_once():
    rows = [row("ab", 30, round=turn) for turn in range(3)]
    found = pooled(rows, 0.5)
    assert (found.prompts, found.new_tokens, found.decoded_tokens) == (2, 90, 84)


def test_a_near_tie_is_a_few_ulps():
    assert near_tie("bfloat16") == 4 * 2.0**-3
    assert near_tie("float16") == 4 * 2.0**-6
    assert near_tie("float32") == 64 * 2.0**-19
    assert near_tie("bfloat16", 64.0) == 4 * 2.0**-1 and near_tie("bfloat16", 2.0) == 4 * 2.0**-6
    with pytest.raises(ValueError, match="int8"):
        near_tie("int8")


def test_a_ratio_is_pooled_and_its_interval_is_that_of_resampled_prompts(monkeypatch):
    monkeypatch.setattr(statistics, "FEWEST", 3)
    ours = [row("a", 101, 1.0), row("b", 11, 1.0), row("c", 51, 2.0)]
    base = [row("a", 101, 2.0), row("b", 11, 0.5), row("c", 51, 2.0)]
    found = speed_ratio(ours, base)
    assert found.value == pytest.approx(4.5 / 4)  # tokens are the same, seconds 4 and 4.5
    # Three prompts have 10 different resamples, the extremes of which are three times the same prompt.
    assert (found.low, found.high) == pytest.approx((0.5, 2.0))
    assert speed_ratio(ours, ours) == Estimate(1, 1, 1)


def test_pairing_removes_what_both_sides_share():
    """A prompt may be ten times as slow as another: if both methods say so, their ratio is none the less sure."""
    spread = np.exp(np.random.default_rng(0).normal(0, 1, 40))
    base = [row([f"p{i}"], 65, float(pace)) for i, pace in enumerate(spread)]
    ours = [row([f"p{i}"], 65, float(pace) / 2) for i, pace in enumerate(spread)]
    found = speed_ratio(ours, base)
    assert (found.low, found.high) == pytest.approx((2, 2))
    assert speed(ours).high / speed(ours).low > 1.5


def test_rounds_of_a_prompt_are_drawn_together():
    once = simulated(0, noise=0)
    thrice = simulated(0, rounds=3, noise=0)
    # Rounds that repeat each other tell nothing new: the interval must not shrink.
    one, three = speed_ratio(*once), speed_ratio(*thrice)
    assert (one.value, one.low, one.high) == pytest.approx((three.value, three.low, three.high))


def test_batches_are_drawn_as_a_whole(monkeypatch):
    monkeypatch.setattr(statistics, "FEWEST", 3)
    singles = [row(name, 65, seconds) for name, seconds in zip("abcdef", (1, 2, 3, 4, 5, 6), strict=True)]
    batches = [row("ab", 130, 1.5), row("cd", 130, 3.5), row("ef", 130, 5.5)]
    units, count = statistics._units([*singles, *batches])
    assert count == 3 and [units[name] for name in "abcdef"] == [0, 0, 1, 1, 2, 2]
    found = speed_ratio(batches, singles)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    # Batches that overlap tie all of their prompts together, in whatever order they come.
    units, count = statistics._units([row("ab"), row("cd"), row("bc"), row("e")])
    assert count == 2 and len({units[name] for name in "abcd"}) == 1


def test_a_few_prompts_have_no_interval():
    for count, known in ((7, False), (8, True)):
        base = [row([f"p{i}"], 65, 1 + i / 100) for i in range(count)]
        assert speed_ratio(base, base).known == speed(base).known == known
    # Batches count, not the prompts in them.
    pairs = [row([f"a{i}", f"b{i}"], 65, 1.0) for i in range(7)]
    assert not speed(pairs).known


def test_one_prompt_says_nothing_about_others():
    found = speed_ratio([row(seconds=1.0)], [row(seconds=2.0)])
    assert (found.value, found.low, found.high, found.known) == (2, 0, math.inf, False)
    assert found.repeat == (0, math.inf) and not is_slower(found)
    empty = speed_ratio([row("a", 1), row("b", 1)], [row("a", 1), row("b", 1)])  # the prefill was all
    assert math.isnan(empty.value) and not empty.known and not is_slower(empty)


def test_a_ratio_needs_the_same_prompts():
    with pytest.raises(ValueError, match="same prompts on both sides; b and 1 more"):
        speed_ratio([row("a"), row("b")], [row("a"), row("c")])
    with pytest.raises(ValueError, match="no rows"):
        speed_ratio([], [])


def test_a_planted_slowdown_is_found_and_no_other():
    for seed in range(10):
        base, same, slow = simulated(seed, methods=3, slowdown=1.1)
        # The third method is 10 % slower than it would have been, the second is not; prompts are the same.
        _, _, unharmed = simulated(seed, methods=3)
        found = speed_ratio(slow, unharmed)
        assert is_slower(found) and found.high < 0.95 and found.low < 1 / 1.1 + 0.02, seed
        again = simulated(seed, methods=3, timing=1)[2]
        assert not is_slower(speed_ratio(again, unharmed)) and not is_slower(speed_ratio(unharmed, again)), seed
        assert not is_slower(speed_ratio(base, base)) and same


def test_a_planted_slowdown_is_found_between_different_methods():
    """Methods that like other prompts: 480 prompts tell 10 %."""
    verdicts = [is_slower(speed_ratio(*reversed(simulated(seed, 480, slowdown=1.1)))) for seed in range(20)]
    assert sum(verdicts) >= 0.95 * 20
    verdicts = [is_slower(speed_ratio(*reversed(simulated(seed, 480)))) for seed in range(20)]
    assert sum(verdicts) <= 2  # 2.5 % are expected


@pytest.mark.parametrize("prompts", [8, 16, 80])
def test_the_interval_covers_the_ratio_of_all_prompts(prompts):
    """Two methods of the same speed in the mean, 400 runs: the interval should hold 1 in 95 % of them."""
    covered = 0
    for seed in range(400):
        ratio = speed_ratio(*simulated(seed, prompts), resamples=1_000)
        covered += ratio.low <= 1 <= ratio.high
    assert covered / 400 == pytest.approx(0.95, abs=0.035)  # 3 standard errors


@pytest.mark.parametrize(("spread", "noise"), [("same", 0.15), ("other", 0.03)])
def test_a_repeated_run_stays_within_the_stated_interval(spread, noise):
    """The demand on the benchmark: repeated runs, with the same prompts or with others, stay where they should."""
    inside = narrow = 0
    for seed in range(200):
        first = speed_ratio(*simulated(seed, noise=noise), resamples=1_000)
        again = simulated(seed, noise=noise, timing=1) if spread == "same" else simulated(10_000 + seed, noise=noise)
        second = speed_ratio(*again, resamples=2).value
        low, high = first.repeat
        inside += low < second < high
        narrow += first.low < second < first.high
    assert inside / 200 >= 0.9
    if spread == "other":
        assert narrow / 200 < 0.9  # the interval alone would not do


def test_repetition_widens_by_root_two():
    low, high = Estimate(2.0, 2.0 * math.exp(-0.1), 2.0 * math.exp(0.2)).repeat
    assert (math.log(low / 2), math.log(high / 2)) == pytest.approx((-0.1 * 2**0.5, 0.2 * 2**0.5))


def test_intervals_overlap_or_not():
    first, second, third = Estimate(1, 0.9, 1.1), Estimate(1.2, 1.1, 1.3), Estimate(1.4, 1.31, 1.5)
    assert first.overlaps(second) and second.overlaps(first)
    assert not second.overlaps(third) and not third.overlaps(first)


def test_the_seed_fixes_everything_and_it_is_fast():
    sides = simulated(0, 480, rounds=2)
    statistics._draws.cache_clear()
    started = time.perf_counter()
    first = speed_ratio(*sides)
    assert time.perf_counter() - started < 1.5  # 0.1 s on an idle core
    assert speed_ratio(*sides) == first != speed_ratio(*sides, seed=1)


def a_result(failures=()):
    conditions = (
        Condition("hf", 0.0, None, 1), Condition("vanilla", 0.0, "greedy", 1), Condition("hf", 1.0, None, 1),
        Condition("vanilla", 1.0, "coupled", 1), Condition("vanilla", 1.0, "residual", 1),
        Condition("medusa", 1.0, "residual", 1), Condition("medusa", 1.0, "traversal", 1),
    )  # fmt: skip
    rows = [
        row([name], 65, 1.0 + index / 10, condition=index, category=category)
        for name, category in (("a", "chat"), ("b", "math"), ("c", "math"), ("d", "chat"))
        for index in range(len(conditions))
    ]
    return Result(
        "", {}, {}, {"dtype": "bfloat16", "logits": 16.0}, {}, conditions, tuple(rows), tuple(failures), None, ()
    )


def test_a_summary_is_by_condition_and_category():
    summary = Summary(a_result())
    assert (summary.categories, summary.prompts) == (("chat", "math"), 4)
    assert summary.figures(0).prompts == 4 and summary.figures(0, "math").prompts == 2
    assert summary.ratio(1, 0, "math").value == pytest.approx(1 / 1.1)
    assert summary.speed(1).value == pytest.approx(64 / 1.1)
    assert summary.speed(1, prefill=True).value == pytest.approx(65 / 1.21)
    assert summary.rows(0, "nowhere") == []


def test_near_ties_are_those_of_the_target_that_was_run():
    small = replace(a_result(), target={"dtype": "float16", "logits": 2.0})
    assert Summary(small).tie == near_tie("float16", 2.0) != Summary(a_result()).tie


def test_a_prompt_that_failed_anywhere_counts_nowhere():
    summary = Summary(a_result([Failure(3, ("a",), "no")]))
    assert summary.prompts == 3 and all(summary.figures(index).prompts == 3 for index in range(7))


def test_the_baseline_shares_temperature_batch_and_rule():
    summary = Summary(a_result())
    assert [summary.baseline_of(index, "hf") for index in range(7)] == [0, 0, 2, 2, 2, 2, 2]
    # A rule that the baseline was not run with is compared with the first one that it was.
    assert [summary.baseline_of(index, "vanilla") for index in range(7)] == [1, 1, 3, 3, 4, 4, 3]
    assert summary.baseline_of(0, "medusa") is None
