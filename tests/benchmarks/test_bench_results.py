"""The result file: what is written is read, and what is broken is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from treedec.benchmarks.results import (
    SCHEMA,
    Condition,
    Expectation,
    Failure,
    Result,
    Row,
    read_result,
    to_json,
    write_result,
)


def row(condition=0, prompts=("a",), round=0, **more):
    fields = {
        "condition": condition, "round": round, "prompts": tuple(prompts), "category": "qa", "prompt_tokens": 5,
        "new_tokens": 9, "prefill_seconds": 0.5, "decode_seconds": 2.0, "draft_seconds": None, "target_seconds": None,
        "passes": None, "nodes": None, "accepted_lengths": None, "acceptance_by_place": None, "digest": "00",
        "matches": None, "first_difference": None, "logit_gap": None,
    }  # fmt: skip
    return Row(**(fields | more))


OURS = {
    "draft_seconds": 0.25, "target_seconds": 1.0, "passes": 3, "nodes": 9, "accepted_lengths": {1: 1, 3: 2},
    "matches": False, "acceptance_by_place": {"1,1": (3, 2), "1,2": (3, 0)}, "first_difference": 4, "logit_gap": 0.125,
}  # fmt: skip


def result(rows=(), failures=(), conditions=2):
    names = [
        Condition("hf", 0.0, None, 1),
        Condition("recurrent@32", 1.0, "residual", 4),
        Condition("ar", 0.0, "greedy", 1),
    ]
    return Result(
        "treedec bench", {"threads": 2}, {"torch": "2"}, {"name": "demo", "dtype": "bfloat16", "logits": 16.0},
        {"seed": 0},
        tuple(names[:conditions]),
        tuple(rows), tuple(failures), {"nodes": [1, 2], "seconds": [0.01, 0.011], "context": 192, "compiled": False},
        (Expectation("ngram", 1.0, 96, "coupled", 4, 0.25, None),),
    )  # fmt: skip


WHOLE = result([row(), row(1, ("a", "b"), **OURS)], [Failure(0, ("c",), "RuntimeError: boom")])


def test_a_result_survives_the_file(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, WHOLE)
    assert read_result(path) == WHOLE
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["schema"] == SCHEMA


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError):
        write_result(tmp_path / "result.json", result([row(decode_seconds=float("nan"))]))
    assert list(tmp_path.iterdir()) == []


def test_labels_leave_out_defaults():
    assert [condition.label for condition in WHOLE.conditions] == ["hf", "recurrent@32 T=1 residual b4"]
    assert Condition("ngram", 0.7, "coupled", 1).label == "ngram T=0.7"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path, share):
    path = tmp_path / "result.json"
    write_result(path, WHOLE)
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(ValueError, match="cut short") as error:
        read_result(path)
    assert str(path) in str(error.value)


def changed(change):
    data = {"schema": SCHEMA, **json.loads(json.dumps(to_json(WHOLE)))}
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.pop("schema"), "no key 'schema'"),
        (lambda data: data.update(schema=1), "schema is 1"),
        (lambda data: data.pop("rows"), "'rows' is missing"),
        (lambda data: data.update(more=1), "unknown key 'more'"),
        (lambda data: data["rows"][1].pop("digest"), r"'digest' is missing in rows\[1\]"),
        (lambda data: data["rows"][0].update(tokens=3), r"unknown key 'tokens' in rows\[0\]"),
        (lambda data: data["rows"][1].update(new_tokens="9"), r"rows\[1\]\.new_tokens must be a whole number, not '9'"),
        (lambda data: data["rows"][1].update(new_tokens=True), r"rows\[1\]\.new_tokens must be a whole number"),
        (lambda data: data["rows"][0].update(decode_seconds=None), r"rows\[0\]\.decode_seconds must be a number"),
        (lambda data: data["rows"][0].update(matches=1), r"rows\[0\]\.matches must be true or false"),
        (lambda data: data["rows"][0].update(prompts="a"), r"rows\[0\]\.prompts must be a list"),
        (lambda data: data["rows"][0].update(prompts=[]), r"rows\[0\]\.prompts is empty"),
        (lambda data: data["rows"][0].update(condition=2), r"rows\[0\]\.condition is 2, of 2"),
        (lambda data: data["failures"][0].update(condition=-1), r"failures\[0\]\.condition is -1"),
        (lambda data: data["rows"][1].update(accepted_lengths={"x": 1}), "accepted_lengths has the key 'x'"),
        (lambda data: data["rows"][1].update(acceptance_by_place={"1,1": [1]}), "must have 2 entries, not 1"),
        (lambda data: data["conditions"][1].update(data["conditions"][0]), "'hf' twice"),
        (lambda data: data.update(machine=[]), "machine must be an object"),
        (lambda data: data["costs"].pop("context"), "'context' is missing in costs"),
        (lambda data: data["target"].pop("dtype"), "'dtype' is missing in target"),
        (lambda data: data["rows"].append(data["rows"][1]), "prompt 'a' twice in round 0 of 'recurrent@32 T=1"),
        (lambda data: data["rows"][0].update(decode_seconds=-1.0), r"rows\[0\].decode_seconds is -1"),
        (lambda data: data["rows"][1].update(passes=4), r"rows\[1\].accepted_lengths has 3 passes, not 4"),
        (lambda data: data["rows"][1]["acceptance_by_place"].update({"0,1": [1, 1]}), "'0,1', which is no 'depth"),
        (lambda data: data["rows"][1].update(nodes=2), r"rows\[1\].nodes is 2, and each of its 3 passes"),
        (lambda data: data["costs"]["nodes"].pop(), "differ in length"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(tmp_path, change, said):
    path = tmp_path / "result.json"
    path.write_text(changed(change))
    with pytest.raises(ValueError, match=said) as error:
        read_result(path)
    assert str(path) in str(error.value)


def test_numbers_too_large_for_a_float_are_named(tmp_path):
    write_result(tmp_path / "result.json", WHOLE)
    text = (tmp_path / "result.json").read_text()
    (tmp_path / "result.json").write_text(text.replace('"draft_seconds": 0.25', '"draft_seconds": 1e999'))
    with pytest.raises(ValueError, match=r"rows\[1\].draft_seconds is inf"):
        read_result(tmp_path / "result.json")


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"schema": 3, "rows": NaN}', "\udce9"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"result\.json"):
        read_result(path)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        read_result(tmp_path / "nowhere.json")


class TestCompleteRows:
    def test_all_are_complete_when_everybody_has_everything(self):
        whole = result([row(c, (p,)) for p in "ab" for c in (0, 1)])
        assert whole.complete_rows() == whole.rows

    def test_a_failed_prompt_counts_for_nobody(self):
        rows = [row(c, (p,)) for p in "ab" for c in (0, 1)]
        assert result(rows, [Failure(1, ("a",), "boom")]).complete_rows() == tuple(rows[2:])

    def test_a_prompt_that_one_condition_lacks_counts_for_nobody(self):
        rows = [row(0, "a"), row(0, "b"), row(1, "b")]
        assert result(rows).complete_rows() == tuple(rows[1:])

    def test_every_round_is_needed(self):
        rows = [row(c, (p,), round) for round in (0, 1) for p in "ab" for c in (0, 1)]
        assert result(rows[:-1]).complete_rows() == tuple(r for r in rows if r.prompts == ("a",))

    def test_a_batch_falls_with_one_of_its_prompts(self):
        rows = [row(0, (p,)) for p in "abcd"] + [row(1, "ab"), row(1, "cd")]
        kept = result(rows, [Failure(0, ("a",), "boom")]).complete_rows()
        assert kept == (rows[2], rows[3], rows[5])

    def test_nothing_may_be_left(self):
        assert result([row(0, "a")]).complete_rows() == ()

    def test_seconds_are_both_parts(self):
        assert replace(row(), prefill_seconds=1.5).seconds == 3.5


def test_tokens_of_the_first_pass_are_not_decoded_ones():
    assert row(prompts="ab").decoded_tokens == 9 - 2
    assert row(accepted_lengths={1: 2, 4: 1}).decoded_tokens == 6  # of 9: three came with the first pass
