"""Reports of made-up runs: what stands on the first page, what is refused, what is written."""

from __future__ import annotations

import builtins
from dataclasses import replace

import numpy as np
import pytest

from treedec.benchmarks import markdown, plots, report
from treedec.benchmarks.losses import losses
from treedec.benchmarks.report import render
from treedec.benchmarks.results import Condition, Expectation, Failure, Result, Row, read_result, write_result
from treedec.benchmarks.statistics import Summary
from treedec.benchmarks.theory import predictions

HF, AR = Condition("hf", 0.0, None, 1), Condition("ar", 0.0, "greedy", 1)
VANILLA, ASSISTED = Condition("vanilla", 0.0, "greedy", 1), Condition("hf-assisted", 0.0, None, 1)
SMALL, LARGE = Condition("medusa@4", 0.0, "greedy", 1), Condition("medusa@16", 0.0, "greedy", 1)
COSTS = {"nodes": [1, 2, 4, 8, 16], "seconds": [0.02, 0.021, 0.023, 0.03, 0.05], "context": 64, "compiled": False}
TARGET = {"name": "tiny", "dtype": "bfloat16", "layers": 2, "logits": 16.0}


@pytest.fixture
def pictures():
    """For tests that want them drawn."""


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """Drawing takes longer than all else: where nobody looks, one stand-in is enough."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report, "draw", lambda *_: {"speedup": b"\x89PNG " + plots.SOFTWARE.encode()})


def run(paces, prompts=24, clock=0, batch=None, failures=(), **more):
    """A run whose conditions take so many seconds per token, as `{condition: seconds or {category: seconds}}`."""
    noise = np.random.default_rng(clock)
    rows = []
    for prompt in range(prompts):
        category = ("chat", "math")[prompt % 2]
        for index, (condition, pace) in enumerate(paces.items()):
            each = (pace[category] if isinstance(pace, dict) else pace) * float(np.exp(noise.normal(0, 0.02)))
            rows.append(row(index, condition, f"p{prompt}", category, each))
    return Result(
        **{
            "command": "treedec bench --methods hf,ar --out result.json",
            "machine": {"processor": "Abacus | 9000", "threads": 2},
            "versions": {"treedec": "0.1.0"},
            "target": TARGET,
            "settings": {"seed": 7, "draft_tokens": 3, "prompts": {"file": "prompts.jsonl", "digest": "d1"}},
            "conditions": tuple(paces),
            "rows": tuple(rows),
            "failures": tuple(failures),
            "costs": COSTS,
            "expected": (),
            **more,
        }
    )


def row(index, condition, name, category, pace):
    """41 new tokens, 40 of them decoded, two per pass unless the method drafts nothing."""
    ours, length = condition.acceptance is not None, 1 if condition.method in ("hf", "ar") else 2
    seconds, passes = 40 * pace, 40 // length
    places = {"1,1": (passes, passes // 2), "1,2": (passes, passes // 4), "2,1": (passes // 2, passes // 8)}
    return Row(
        index, 0, (name,), category, 9, 41, 0.1, seconds,
        0.1 * seconds if ours else None, 0.8 * seconds if ours else None, passes if ours else None,
        None, {length: passes} if ours else None, places if ours and length > 1 else None,
        "00", True, None, None,
    )  # fmt: skip


FAST = {HF: 0.030, AR: 0.030, VANILLA: 0.020, SMALL: 0.010, LARGE: 0.012}


def section(text, title):
    """What stands under a heading, up to the next one of its level."""
    level = title.partition(" ")[0]
    return text.split(f"\n{title}\n", 1)[1].split(f"\n{level} ", 1)[0]


def cells(text, label):
    """The cells behind the label of a row of a table."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")][1:]


def test_the_first_page_has_all_conditions_and_then_where_we_lose(tmp_path):
    text = render([run(FAST)], tmp_path / "report")
    assert text == (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[:3] == ["# tiny in bfloat16", "## All conditions", "## Where we lose"]
    table = section(text, "## All conditions")
    assert cells(table, "hf")[1:] == ["1", "1", "–", "–", "100 %", "–"]
    speed, ratio, with_prefill, over_plain, length, same, ties = cells(table, "medusa@4")
    assert 95 < float(speed) < 105 and (length, same, ties) == ("2.00", "100 %", "–")
    value, low, high = (float(part) for part in ratio.replace("[", "").replace("]", "").replace(",", "").split())
    assert 2.9 < low < value < high < 3.1 and with_prefill != ratio and over_plain.startswith(("2.9", "3.0"))
    assert "Nowhere that this run could tell" in section(text, "## Where we lose")


def test_the_files_are_a_report_and_its_pictures_and_read_results_give_the_same(tmp_path, pictures):
    result = run(FAST)
    text = render([result], tmp_path / "one")
    write_result(tmp_path / "result.json", result)
    assert render([read_result(tmp_path / "result.json")], tmp_path / "two") == text
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    expected = ["acceptance.png", "accepted_length.png", "report.md", "speedup.png", "time_split.png", "tree_size.png"]
    assert names == expected
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
        assert name == "report.md" or f"]({name})" in text


def test_a_loss_is_named_with_its_category_and_rival(tmp_path):
    slow_at_math = {"chat": 0.010, "math": 0.040}
    result = run({HF: 0.030, ASSISTED: 0.012, AR: 0.033, VANILLA: 0.020, SMALL: slow_at_math})
    text = section(render([result], tmp_path / "report"), "## Where we lose")
    found = {(loss.condition, loss.against, loss.prefill): set(loss.places) for loss in losses(Summary(result))}
    everywhere = {None, "chat", "math"}
    assert found == {
        (2, 0, False): everywhere, (2, 0, True): everywhere,  # ar against hf, and against nothing else
        (3, 1, True): everywhere,  # vanilla against hf-assisted
        (4, 0, False): {"math"}, (4, 0, True): {"math"}, (4, 1, True): {None, "math"},
        (4, 3, False): {"math"},
    }  # fmt: skip
    against_hf, against_assisted = (
        line for line in text.splitlines() if line.startswith("| medusa@4 | hf") and "pref" in line
    )
    assert "| hf | with prefill | no | math 0.7" in against_hf and "chat" not in against_hf
    assert "| hf-assisted | with prefill | 0." in against_assisted
    assert "Looked at: 3 conditions of treedec's, over all prompts and in each of 2 categories" in text
    assert "likewise against the fastest of ar, hf-assisted, vanilla." in text


def test_ours_may_lose_to_vanilla_but_vanilla_not_to_ours():
    found = losses(Summary(run({HF: 0.030, VANILLA: 0.010, SMALL: 0.020})))
    assert {(loss.condition, loss.against) for loss in found} == {(2, 1)}
    assert losses(Summary(run({HF: 0.030, VANILLA: 0.020, SMALL: 0.010}))) == []


def test_decoding_without_drafts_is_compared_with_hf_only_compiled_or_not():
    compiled = Condition("compiled:ar", 0.0, "greedy", 1)
    assert losses(Summary(run({HF: 0.030, VANILLA: 0.010, AR: 0.025, compiled: 0.020}))) == []


def test_losses_are_looked_for_at_every_temperature_and_batch():
    sampled, base = Condition("medusa", 1.0, "coupled", 1), Condition("hf", 1.0, None, 1)
    result = run({HF: 0.030, Condition("medusa", 0.0, "greedy", 1): 0.010, base: 0.030, sampled: 0.040})
    assert {(loss.condition, loss.against) for loss in losses(Summary(result))} == {(3, 2)}
    alone = run({HF: 0.010, Condition("medusa", 0.0, "greedy", 4): 0.040})
    assert losses(Summary(alone)) == []  # nothing of that batch to lose to


def test_what_was_not_run_is_said(tmp_path):
    text = section(render([run({AR: 0.030})], tmp_path / "a"), "## Where we lose")
    assert "Unknown: neither `hf` nor another method was run to lose to." in text
    text = section(render([run({HF: 0.030, ASSISTED: 0.010})], tmp_path / "b"), "## Where we lose")
    assert text.strip() == "Nothing of treedec's was run."


def test_what_the_noise_hides_is_no_loss_and_is_said(tmp_path):
    text = section(render([run({HF: 0.030, AR: 0.030, SMALL: 0.010})], tmp_path / "report"), "## Where we lose")
    assert "Neither faster nor slower than `hf` beyond the noise, decoding: ar." in text


def test_other_tokens_are_told_with_their_near_ties(tmp_path):
    result = run({HF: 0.030, SMALL: 0.010})
    rows = list(result.rows)
    for place, gap in ((1, 0.125), (3, 0.5), (5, 2.0)):
        rows[place] = replace(rows[place], matches=False, first_difference=4, logit_gap=gap)
    text = render([replace(result, rows=tuple(rows))], tmp_path / "report")
    assert cells(section(text, "## All conditions"), "medusa@4")[-2:] == ["88 %", "67 % of 3"]
    assert "Other greedy tokens than `hf`, and not at a near-tie: medusa@4 (1 of 24 outputs)." in text


def test_only_rules_that_promise_tokens_are_held_to_them(tmp_path):
    sampled = [Condition("medusa", 1.0, rule, 1) for rule in ("coupled", "residual", "typical")]
    result = run({Condition("hf", 1.0, None, 1): 0.030, **dict.fromkeys(sampled, 0.010)})
    table = section(render([result], tmp_path / "report"), "## All conditions")
    assert cells(table, "medusa T=1")[4] == "100 %" and cells(table, "medusa T=1 residual")[4] == "–"
    assert cells(table, "medusa T=1 typical (lossy)")[4] == "–"


def test_nearly_all_is_not_all():
    assert [markdown.percent(value) for value in (1.0, 0.999, 0.995, 0.5, 0.0)] == [
        "100 %",
        "99 %",
        "99 %",
        "50 %",
        "0 %",
    ]


def test_predictions_stand_beside_measurements(tmp_path):
    result = run(FAST)
    found = predictions(Summary(result))
    assert [result.conditions[index].method for index in found] == ["ar", "vanilla", "medusa@4", "medusa@16"]
    draft = 0.1 * 2 * 0.010  # of two tokens a pass
    assert found[3].seconds_per_token == pytest.approx((0.023 + draft) / 2, rel=0.01)
    assert found[3].speedup == pytest.approx(0.02 * 2 / (0.023 + draft), rel=0.01)
    assert found[2].seconds_per_token == pytest.approx((0.023 + 0.1 * 2 * 0.020) / 2, rel=0.01)  # 3 drafts and the root
    text = section(render([result], tmp_path / "report"), "## Predicted and measured speed-up")
    nodes, length, draft_ms, curve, _, _, measured, speedup, ratio = cells(text, "medusa@4")
    assert (nodes, length, curve) == ("4.0", "2.00", "23.00") and float(draft_ms) == pytest.approx(2, abs=0.03)
    assert float(measured) == pytest.approx(100, rel=0.03) and float(speedup) == pytest.approx(1.6, abs=0.02)
    assert ratio.endswith("× ar") and ratio.startswith(("2.9", "3.0"))


def test_trees_of_varying_size_are_predicted_by_the_mean_of_what_was_verified(tmp_path):
    union = Condition("union", 0.0, "greedy", 1)
    result = run({HF: 0.030, union: 0.010})
    assert predictions(Summary(result)) == {}  # neither the name nor the rows say how large its trees were
    sizes = [3, 9]  # nodes a pass, of every other prompt
    rows = [
        replace(row, nodes=sizes[place // 2 % 2] * row.passes) if row.passes else row
        for place, row in enumerate(result.rows)
    ]
    result = replace(result, rows=tuple(rows))
    (found,) = predictions(Summary(result)).values()
    cost, draft = (0.023 + 0.030) / 2, 0.1 * 2 * 0.010  # six nodes lie half-way between four and eight
    assert found.seconds_per_token == pytest.approx((cost + draft) / 2, rel=0.01)
    text = section(render([result], tmp_path / "report"), "## Predicted and measured speed-up")
    assert cells(text, "union")[0] == "6.0"


def test_a_compiled_target_is_not_predicted_from_the_costs_of_another():
    compiled = Condition("compiled:medusa@4", 0.0, "greedy", 1)
    assert set(predictions(Summary(run({HF: 0.030, SMALL: 0.010, compiled: 0.008})))) == {1}


def test_trees_beyond_the_curve_are_not_predicted(tmp_path):
    beyond = Condition("medusa@32", 0.0, "greedy", 1)
    batched = Condition("medusa@4", 0.0, "greedy", 2)
    assert predictions(Summary(run({HF: 0.03, beyond: 0.01, batched: 0.01}))) == {}
    text = render([run({HF: 0.03, SMALL: 0.01}, costs=None)], tmp_path / "report")
    assert "was not measured in this run" in section(text, "## Predicted and measured speed-up")


def test_failures_are_listed_and_count_for_nobody(tmp_path):
    result = run(FAST, failures=[Failure(3, ("p3",), "RuntimeError: a | b\n  and\nmore")])
    result = replace(result, rows=tuple(row for row in result.rows if row.prompts != ("p4",) or row.condition == 0))
    text = render([result], tmp_path / "report")
    excluded = section(text, "## Excluded prompts")
    assert "22 of 24 prompts, in 2 categories" in text and "2 of 24 prompts count for no condition" in excluded
    assert "| p3 | medusa@4 | RuntimeError: a \\| b and more |" in excluded
    assert "| p4 | – | not decoded by every condition" in excluded
    text = render([run(FAST)], tmp_path / "report")
    assert section(text, "## Excluded prompts").strip().startswith("None:")


def test_what_rules_should_accept_stands_beside_what_was_accepted(tmp_path):
    sampled, drafted = Condition("hf", 1.0, None, 1), Condition("medusa@4", 1.0, "coupled", 1)
    expected = tuple(
        Expectation("medusa@4", 1.0, 96, rule, drafts, 0.1 * drafts, error)
        for rule, error in (("coupled", 0.0123), ("optimum", None))
        for drafts in (1, 4)
    )
    text = render([run({sampled: 0.03, drafted: 0.01}, expected=expected)], tmp_path / "report")
    table = section(text, "### Expected acceptance of one step")
    assert "| drafts of | rule | 1 child | 4 children |" in table
    lines = [line for line in table.splitlines() if line.startswith("| medusa@4 T=1 |")]
    assert lines[0].endswith("| 0.100 ± 0.012 | 0.400 ± 0.012 |") and lines[1].endswith("| 0.100 | 0.400 |")
    assert "at 96 tokens" in table and "medusa@4 T=1 0.750 of 2.0 children" in table
    greedy = run({HF: 0.03, SMALL: 0.01})
    assert "Expected acceptance of one step" not in render([greedy], tmp_path / "report")


def test_where_it_came_from_is_told(tmp_path):
    text = section(render([run(FAST)], tmp_path / "report"), "## How it was measured")
    assert "treedec bench --methods hf,ar --out result.json" in text
    assert "| machine | processor | Abacus \\| 9000 |" in text and "| settings | seed | 7 |" in text
    assert "| versions | treedec | 0.1.0 |" in text and "| target | dtype | bfloat16 |" in text


def test_another_baseline(tmp_path):
    text = render([run(FAST)], tmp_path / "report", baseline="vanilla")
    assert "over `vanilla`" in text and cells(section(text, "## All conditions"), "vanilla")[1] == "1"
    with pytest.raises(ValueError, match="baseline 'eagle' was not run; methods are hf, ar, vanilla"):
        render([run(FAST)], tmp_path / "report", baseline="eagle")
    text = render([run({AR: 0.030, SMALL: 0.010})], tmp_path / "other")  # without hf, the first method
    assert "over `ar`" in text


def test_runs_are_compared(tmp_path):
    slower = {**FAST, SMALL: 0.012}
    del slower[LARGE]
    text = render([run(FAST), run(slower, clock=1, versions={"treedec": "0.2.0"})], tmp_path / "report")
    assert text.splitlines()[2] == "# Comparison of 2 runs"
    table = section(text, "## All conditions")
    first, second, moved, overlap, repeated = cells(table, "medusa@4")
    assert first.startswith(("2.9", "3.0")) and second.startswith("2.5")
    assert float(moved.split()[0]) == pytest.approx(20, abs=3) and (overlap, repeated) == ("**no**", "**no**")
    assert cells(table, "vanilla")[3:] == ["yes", "yes"]
    assert cells(table, "medusa@16")[1:] == ["–"] * 4
    assert cells(text, "versions: treedec") == ["0.1.0", "0.2.0"] and cells(text, "target: dtype") == ["bfloat16"] * 2
    assert "### Run 1" in section(text, "## Where we lose") and "# Run 2: tiny in bfloat16" in text
    assert "](run1-speedup.png)" in text and (tmp_path / "report" / "run2-speedup.png").exists()


def test_runs_of_the_same_weights_in_another_dtype_are_compared(tmp_path):
    one, other = run({HF: 0.03, SMALL: 0.01}), run({HF: 0.03, SMALL: 0.01})
    prints = {"architecture": "Tiny", "hidden_size": 8, "vocab_size": 9, "layers": 2}
    one = replace(one, target={**TARGET, **prints, "sample": [0.101, -0.2]})
    other = replace(other, target={**TARGET, **prints, "dtype": "float32", "sample": [0.1011, -0.2001]})
    assert "| target: dtype | bfloat16 | float32 |" in render([one, other], tmp_path / "report")
    changed = replace(other, target={**other.target, "sample": [0.3, -0.2]})
    with pytest.raises(ValueError, match=r"runs 1 and 2 have other targets .* LM head differ"):
        render([one, changed], tmp_path / "report")


def test_runs_of_other_targets_or_prompts_are_refused(tmp_path):
    paces, out = {HF: 0.03, SMALL: 0.01}, tmp_path / "report"
    first = run(paces)
    with pytest.raises(ValueError, match="runs 1 and 3 have other targets and cannot be compared: layers is 2 and 3"):
        render([first, run(paces, clock=1), run(paces, target={**TARGET, "layers": 3})], out)
    with pytest.raises(ValueError, match="other prompts and cannot be compared: p22, p23 in one of them only"):
        render([first, run(paces, prompts=22)], out)
    longer = replace(first, rows=tuple(replace(row, prompt_tokens=10) for row in first.rows))
    with pytest.raises(ValueError, match="prompt p0 has 9 and 10 tokens"):
        render([first, longer], out)
    with pytest.raises(ValueError, match="their texts differ"):
        render([first, run(paces, settings={"prompts": {"digest": "d2"}})], out)
    with pytest.raises(ValueError, match="no method in common"):
        render([first, run({AR: 0.03})], out)
    with pytest.raises(ValueError, match="no result"):
        render([], out)
    assert not out.exists()


def test_a_prompt_that_failed_in_one_run_counts_in_none_of_them(tmp_path):
    paces = {HF: 0.03, SMALL: 0.01}
    whole, failed = run(paces), run(paces, failures=[Failure(1, ("p3",), "RuntimeError: no")])
    text = render([whole, failed], tmp_path / "report")
    assert cells(section(text, "## All conditions"), "medusa@4")[2] == "0.0 %"
    assert "| p3 | medusa@4 | RuntimeError: no |" in text


def test_drafting_that_slows_down_is_a_loss_and_the_fastest_others_stand_beside(tmp_path):
    peer, lookup = Condition("peer:vllm", 0.0, None, 1), Condition("hf-prompt-lookup", 0.0, None, 1)
    result = run({HF: 0.030, AR: 0.020, SMALL: 0.022, peer: 0.021, lookup: 0.001})
    found = {(loss.condition, loss.against, loss.prefill) for loss in losses(Summary(result))}
    assert found == {(2, 1, False), (2, 4, True)}  # look-up verifies drafts in its prefill
    text = render([result], tmp_path / "report")
    beside = cells(section(text, "## Where we lose"), "medusa@4")
    assert beside[:3] == ["ar", "decoding", beside[2]] and beside[2].startswith("0.9")
    table = section(text, "## Where we lose").split("beside the fastest of the others")[1]
    decoding, ratio, prefill, _ = cells(table, "medusa@4")
    assert (decoding, prefill) == ("ar", "hf-prompt-lookup") and ratio.startswith("0.9")
    assert not any(line.startswith("| ar |") for line in table.splitlines())
    assert cells(section(text, "## All conditions"), "ar")[3] == "1"
    assert cells(section(text, "## All conditions"), "medusa@4")[3].startswith("0.9")
    assert cells(section(text, "## All conditions"), "peer:vllm")[3] == "–"
    assert "llama.cpp and vLLM decode without drafts here" in text and "hf-assisted-default is how" not in text


def test_what_is_not_compiled_need_not_beat_what_is():
    plain, drafted = Condition("compiled:ar", 0.0, "greedy", 1), Condition("compiled:medusa@4", 0.0, "greedy", 1)
    result = run({HF: 0.030, AR: 0.025, plain: 0.010, SMALL: 0.020, drafted: 0.012})
    assert {(loss.condition, loss.against) for loss in losses(Summary(result))} == {(4, 2)}


def test_an_unfinished_run_says_so_and_is_compared_over_what_both_reached(tmp_path):
    asked = {"prompts": {"digest": "d1", "count": 24}}
    whole, part = (run({HF: 0.03, SMALL: 0.01}, prompts=count, settings=asked) for count in (24, 20))
    assert "more were asked for" not in render([whole], tmp_path / "whole")
    assert "20 of 20 prompts, in 2 categories" in render([part], tmp_path / "part")
    assert "4 more were asked for and are not in this report" in render([part], tmp_path / "part")
    for pair in ([whole, part], [part, whole]):
        text = render(pair, tmp_path / "both")
        assert cells(text, "prompts") == ["20 of 20", "20 of 20"]
        # Equal clocks up to there, so that equal prompts have equal speeds.
        assert cells(section(text, "## All conditions"), "medusa@4")[2] == "0.0 %"
    with pytest.raises(ValueError, match="in one of them only"):
        render([whole, replace(part, settings={"prompts": {"digest": "d2", "count": 24}})], tmp_path / "both")


def test_a_run_without_a_complete_prompt_is_refused(tmp_path):
    failures = [Failure(1, (f"p{prompt}",), "ValueError: no") for prompt in range(24)]
    with pytest.raises(ValueError, match="nothing to report; the first failure: medusa@4: ValueError: no"):
        render([run({HF: 0.03, SMALL: 0.01}, failures=failures)], tmp_path / "report")


def test_files_that_no_report_wrote_are_kept(tmp_path):
    out = tmp_path / "report"
    out.mkdir()
    for name, content in (
        ("report.md", b"# my notes\n"),
        ("speedup.png", b"\x89PNG of mine"),
        ("mine.png", b"\x89PNG"),
    ):
        (out / name).write_bytes(content)
        if name != "mine.png":
            with pytest.raises(FileExistsError, match=f"{name} is in the way"):
                render([run({HF: 0.03, SMALL: 0.01})], out)
            assert [path.read_bytes() for path in out.iterdir()] == [content]
            (out / name).unlink()
    (out / "report.md").write_bytes(b"# my notes\n")
    render([run({HF: 0.03, SMALL: 0.01})], out, overwrite=True)
    assert "# tiny" in (out / "report.md").read_text() and (out / "mine.png").read_bytes() == b"\x89PNG"
    with pytest.raises(FileExistsError, match="needs a folder"):
        render([run({HF: 0.03, SMALL: 0.01})], out / "report.md")


def test_pictures_of_an_earlier_report_do_not_stay(tmp_path, pictures):
    render([run(FAST)], tmp_path)
    assert (tmp_path / "tree_size.png").exists()
    text = render([run({HF: 0.03, SMALL: 0.01})], tmp_path)
    assert not (tmp_path / "tree_size.png").exists() and "tree_size" not in text
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_of_hf_alone_is_a_report_too(tmp_path, pictures):
    text = render([run({HF: 0.03}, costs=None)], tmp_path)
    assert "There is nothing to compare." in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "time_split.png"]


def test_a_run_of_one_token_each_is_a_report_too(tmp_path, pictures):
    result = run({HF: 0.03, AR: 0.03, SMALL: 0.01})
    empty = {"new_tokens": 1, "decode_seconds": 0.0}
    ours = {"draft_seconds": 0.0, "target_seconds": 0.0, "passes": 0, "accepted_lengths": {}, "acceptance_by_place": {}}
    rows = tuple(replace(row, **empty, **(ours if row.condition else {})) for row in result.rows)
    text = render([replace(result, rows=rows)], tmp_path)
    assert cells(section(text, "## All conditions"), "medusa@4")[:2] == ["–", "–"]


def test_pictures_show_what_was_measured():
    summary = Summary(run(FAST))
    speed = plots.speedup(summary, "hf")
    assert [panel.get_title() for panel in speed.axes] == ["all prompts", "chat", "math"]
    labels = [label.get_text() for label in speed.axes[0].get_yticklabels()]
    assert labels == ["ar", "vanilla", "medusa@4", "medusa@16"]
    middle = [line.get_xdata()[0] for line in speed.axes[0].get_lines() if len(line.get_xdata()) == 1]
    assert any(value == pytest.approx(summary.ratio(3, 0).value) for value in middle)
    sizes = plots.tree_size(summary)
    assert [line.get_xdata().tolist() for line in sizes.axes[1].get_lines()] == [COSTS["nodes"]]
    assert plots.accepted_length(Summary(run({HF: 0.03, AR: 0.03}))) is None
    shares = plots.acceptance(summary).axes[1].get_images()[0].get_array()
    assert shares[0].tolist() == [0.5, 0.25] and shares[1, 0] == pytest.approx(0.2)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, pictures):
    imported = builtins.__import__

    def refuse(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"pip install 'treedec\[bench\]'"):
        render([run(FAST)], tmp_path / "report")
    assert not (tmp_path / "report").exists()
