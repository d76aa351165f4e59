"""The comparison on a tiny random model: what it reads, what it pools, what it writes."""

from __future__ import annotations

import json

import pytest
import torch

from treedec.benchmarks import compare
from treedec.benchmarks.compare import Row, pooled, read_methods, read_prompts
from treedec.demo import first_difference
from treedec.stats import DecodingStats

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def line(name, category="writing", turn="one two", **more):
    return json.dumps({"question_id": name, "category": category, "turns": [turn, "and then?"], **more})


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the comparison in this process, without a GPU: `run(*arguments) -> (exit code, stdout, stderr)`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        code = compare.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


def test_prompts_are_the_first_turns(prompt_file):
    path = prompt_file(line(81, turn="naïve\u2028one"), line("b", "qa", turn="two"))
    assert read_prompts(path, None) == [("81", "naïve\u2028one"), ("b", "two")]
    assert read_prompts(path, "qa") == [("b", "two")]


def test_mt_bench_is_its_eight_categories(prompt_file):
    categories = ["qa", *MT_BENCH, "rag", "mt_bench"]
    path = prompt_file(*(line(name, name) for name in categories))
    assert [name for name, _ in read_prompts(path, "mt_bench")] == [*MT_BENCH, "mt_bench"]


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "",
        "[1]",
        '{"turns": ["a"]}',
        '{"question_id": 1}',
        '{"question_id": 1, "turns": []}',
        '{"question_id": 1, "turns": "a"}',
        '{"question_id": 1, "turns": [5]}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(prompt_file, broken):
    path = prompt_file(line(7), broken)
    with pytest.raises(ValueError, match="line 2: not a prompt") as error:
        read_prompts(path, None)
    assert str(path) in str(error.value)


def test_a_repeated_id_is_named(prompt_file):
    with pytest.raises(ValueError, match="line 3: question_id 7 appears twice"):
        read_prompts(prompt_file(line(7), line(8), line("7")), None)


def test_a_category_without_prompts_is_an_error(prompt_file):
    with pytest.raises(ValueError, match="no prompts of category 'rag'"):
        read_prompts(prompt_file(line(7)), "rag")


def test_methods_are_cleaned_and_hf_comes_first():
    assert read_methods(" drafter@32, none ,hf,,none,drafter-compiled@8") == [
        "hf", "drafter@32", "none", "drafter-compiled@8",
    ]  # fmt: skip
    assert read_methods("none,drafter") == ["none", "drafter"]


@pytest.mark.parametrize(
    "methods", ["", " , ", "guess", "hf@3", "none@4", "drafter@", "drafter@0", "drafter@x", "hf,Hf"]
)
def test_unknown_methods_are_refused(methods):
    with pytest.raises(ValueError, match="method"):
        read_methods(methods)


def row(seconds, lengths, **more):
    """A row whose passes committed `lengths` tokens, after the one of the prefill."""
    histogram = {length: lengths.count(length) for length in set(lengths)}
    passes = len(lengths)
    return Row("p", "drafter", seconds, DecodingStats(passes, 1 + sum(lengths), 5, passes, histogram), **more)


def test_figures_are_pooled_over_prompts():
    first = row(2.0, [4, 4], matches_hf=True)  # 4 tokens a pass
    second = row(1.0, [1] * 10, matches_hf=False, first_difference=3, logit_gap=0.25)  # 1 token a pass
    third = row(1.0, [], matches_hf=True)  # the prefill's own token was the last
    figures = pooled([first, second, third], greedy=True)
    assert figures == {
        "prompts": 3,
        "new_tokens": 9 + 11 + 1,
        "seconds": 4.0,
        "tokens_per_second": 21 / 4,
        "mean_accepted_length": 18 / 12,  # not (4 + 1) / 2
        "exact_match": 2 / 3,
        "largest_gap_at_first_difference": 0.25,
    }
    assert pooled([first, second, third], greedy=False) == {**figures, "largest_gap_at_first_difference": None}
    assert pooled([first], greedy=True)["largest_gap_at_first_difference"] == 0
    assert pooled([third], greedy=True)["mean_accepted_length"] == DecodingStats().mean_accepted_length == 0


def test_without_hf_there_is_nothing_to_match():
    figures = pooled([row(1.0, [2])], greedy=True)
    assert figures["exact_match"] is None and figures["largest_gap_at_first_difference"] is None


@pytest.mark.parametrize(
    ("reference", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_first_difference(reference, other, place):
    assert first_difference(reference, other) == place


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.9", "--seed", "3"]])
def test_a_comparison_from_end_to_end(run, folder, prompt_file, tmp_path, sampling):
    path = prompt_file(line(1, turn="w3 w1 w4 w1 w5 w3 w1"), line(2, "qa"), line(3, "stem", turn="w9 w2 w9 w2 w9"))
    out = tmp_path / "new" / "result.json"
    code, shown, err = run(
        path, "--target", folder, "--drafter", "ngram", "--methods", "none, drafter,hf", "--dtype", "float32",
        "--category", "mt_bench", "--max-new-tokens", 24, "--out", out, *sampling,
    )  # fmt: skip
    assert code == 0, err
    assert "ratio to hf" in shown
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    result = json.loads(out.read_text(), parse_constant=pytest.fail)  # NaN is not JSON
    assert result["schema"] == 1 and result["machine"]["device"] == "cpu"
    assert list(result["summary"]) == ["hf", "none", "drafter"]
    assert [(row["prompt"], row["method"]) for row in result["rows"]] == [
        (prompt, method) for prompt in ("1", "3") for method in ("hf", "none", "drafter")
    ]
    for method, figures in result["summary"].items():
        assert figures["exact_match"] == 1.0
        assert figures["largest_gap_at_first_difference"] == (None if sampling else 0.0)
        assert figures["new_tokens"] == 2 * 24 and figures["prompts"] == 2
        assert figures["mean_accepted_length"] == 1 or method == "drafter"
    for entry in result["rows"]:
        counts = {int(length): times for length, times in entry["accepted_lengths"].items()}
        assert sum(counts.values()) == entry["passes"]
        assert sum(length * times for length, times in counts.items()) == entry["new_tokens"] - 1 == 23


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "guess"], "unknown method 'guess'"),
        (["--limit", "0"], "--limit"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--dtype", "int3"], "--dtype"),
        (["--category", "rag"], "no prompts of category 'rag'"),
        (["--out", "FOLDER"], "is a folder"),
        (["--out", "FILE/result.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(run, prompt_file, tmp_path, monkeypatch, options, said):
    monkeypatch.setattr(compare, "load", lambda *arguments: pytest.fail("the model was loaded"))
    path = prompt_file(line(1))
    places = {"FOLDER": str(tmp_path), "FILE": str(path)}
    for name, place in places.items():
        options = [option.replace(name, place) for option in options]
    code, out, err = run(path, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("treedec: error: ") and said in err
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_prompt_file_is_one_line(run, tmp_path):
    code, out, err = run(tmp_path / "nowhere.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1) and "nowhere.jsonl" in err
