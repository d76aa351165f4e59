"""`treedec bench` as typed: what it writes and prints, and mistakes as one line."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from treedec import cli
from treedec.benchmarks import bench as bench_module
from treedec.benchmarks.results import Condition, read_result
from treedec.benchmarks.runner import Run
from treedec.cli import bench as command
from treedec.stats import DecodingStats


def line(name, category="qa", turn="w3 w1 w4 w1 w5 w3 w1"):
    return json.dumps({"question_id": name, "category": category, "turns": [turn]})


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the command in this process, without a GPU: `run(*arguments) -> (exit code, stdout, stderr)`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        code = cli.main(["bench", *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def asked(prompt_file):
    return prompt_file(line(1), line(2, "code", "w9 w2 w9 w2 w9"), line(3, turn="w6"), line(4, "code", "w8 w8"))


@pytest.fixture
def usual(folder, asked, tmp_path):
    """Arguments of a run that takes a second."""
    return [
        "--target", folder, "--prompts", asked, "--dtype", "float32", "--max-new-tokens", 8, "--no-costs",
        "--out", tmp_path / "out" / "r.json",
    ]  # fmt: skip


def test_a_run_from_end_to_end(run, usual, folder, tmp_path):
    code, out, err = run(
        *usual, "--methods", f"hf,vanilla, hf-assisted@4,ngram,{folder}@3", "--methods", "ar", "--draft-model", folder,
        "--temperatures", "0,1", "--acceptance", "coupled,residual", "--batch-sizes", "1,2", "--rounds", 2,
        "--threads", 1, "--seed", 3, "--json",
    )  # fmt: skip
    assert code == 0, err
    result = read_result(tmp_path / "out" / "r.json")
    assert result.conditions[:3] == (
        Condition("hf", 0.0, None, 1), Condition("vanilla", 0.0, "greedy", 1), Condition("hf-assisted@4", 0.0, None, 1),
    )  # fmt: skip
    assert result.machine["threads"] == 1
    assert result.machine["instructions"] == torch.backends.cpu.get_cpu_capability()
    labels = [condition.label for condition in result.conditions]
    assert f"{folder.name}@3 T=1 residual b2" in labels and "hf-assisted@4 b2" not in labels
    assert "ar T=1" in labels and "ar T=1 residual" not in labels
    assert not result.failures and result.complete_rows() == result.rows
    assert {row.round for row in result.rows} == {0, 1}
    for row in result.rows:
        if result.conditions[row.condition].acceptance in ("greedy", "coupled"):
            assert row.matches
    assert {(each.method, each.temperature) for each in result.expected} == {
        ("vanilla", 1.0),
        (f"{folder.name}@3", 1.0),
    }
    said = json.loads(out.splitlines()[-1])
    assert (said["prompts"], said["excluded"], said["rows"]) == (4, 0, len(result.rows))
    assert list(said["conditions"]) == labels
    # The draft model is the target itself, so that four tokens and one more are accepted in each pass.
    assert said["conditions"]["vanilla"]["mean_accepted_length"] > 3
    assert result.command.startswith(f"treedec bench --target {folder.name} --prompts prompts.jsonl --dtype float32")
    assert f"--methods 'hf,vanilla, hf-assisted@4,ngram,{folder.name}@3' --methods ar" in result.command
    published = (tmp_path / "out" / "r.json").read_text()
    assert str(tmp_path) not in published and str(folder.parent) not in published
    assert "--no-costs" in result.command and "--draft-model" in result.command


def test_what_is_expected_need_not_be_computed(run, usual, folder, tmp_path):
    code, _, err = run(*usual, "--methods", f"{folder}@3", "--temperatures", "1", "--limit", 1, "--no-expected")
    assert code == 0, err
    assert read_result(tmp_path / "out" / "r.json").expected == ()


def test_out_of_minutes_it_says_how_to_go_on(run, usual, tmp_path):
    journal = tmp_path / "out" / "r.json.partial.jsonl"
    code, out, err = run(*usual, "--methods", "hf,ngram", "--minutes", 0)
    assert code == 0, err
    assert "1 prompts, 0 excluded, 3 not reached, 2 rows" in out and f"{journal} keeps what was measured" in out
    code, out, err = run(*usual, "--methods", "hf,ngram", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["not_reached"] == 0 and not journal.exists()


def test_the_summary_is_a_table(run, usual):
    code, out, err = run(*usual, "--methods", "hf,ngram", "--limit", 1)
    assert code == 0, err
    assert "tokens/s" in out and "2 prompts, 0 excluded, 4 rows" in out


def test_a_failing_prompt_is_counted(run, usual, monkeypatch, tmp_path):
    decode = Run._decode

    def fails(self, index, asked, *turn):
        if index == 1 and asked[0].id == "3":
            raise RuntimeError("boom")
        return decode(self, index, asked, *turn)

    monkeypatch.setattr(Run, "_decode", fails)
    code, out, err = run(*usual, "--methods", "hf,ngram")
    assert code == 0, err
    assert "3 prompts, 1 excluded, 7 rows" in out
    assert [failure.prompts for failure in read_result(tmp_path / "out" / "r.json").failures] == [("3",)]


def test_a_defect_ends_the_run(run, usual, monkeypatch, tmp_path):
    class Twice(DecodingStats):
        def count(self, block):
            super().count(block)
            self.new_tokens += 1 if block.prefill else 0

    monkeypatch.setattr("treedec.benchmarks.methods.DecodingStats", Twice)
    code, out, err = run(*usual, "--methods", "hf,ngram")
    assert (code, out) == (1, "")
    assert "ngram, prompt 1: counts 9 new tokens itself, and returned 8; no result is written" in err
    assert not (tmp_path / "out" / "r.json").exists()


def test_ctrl_c_says_how_to_go_on(run, usual, monkeypatch, tmp_path):
    def stops(self, turn, place, unit):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_measure", stops)
        code, out, err = run(*usual, "--methods", "hf,ngram")
    assert (code, out) == (130, "")
    assert "r.json.partial.jsonl keeps all whole prompts: run the same again to go on" in err
    code, out, err = run(*usual, "--methods", "hf,ngram")
    assert code == 0, err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "guess"], "unknown method 'guess': known are hf, ar"),
        (["--methods", "medusa"], "no shipped heads for the target"),
        (["--methods", "vanilla"], "'vanilla' needs --draft-model"),
        (["--temperatures", "warm"], "--temperatures takes numbers, not 'warm'"),
        (["--temperatures", "-1"], "temperature"),
        (["--batch-sizes", "1.5"], "--batch-sizes takes whole numbers, not '1.5'"),
        (["--batch-sizes", "3"], "do not fill batches of 3"),
        (["--acceptance", "residual"], "--acceptance is about sampling"),
        (["--temperatures", "1", "--acceptance", "guess"], "unknown acceptance rule 'guess'"),
        (["--category", "rag"], "no category 'rag'; it has qa, code"),
        (["--limit", "0"], "--limit"),
        (["--rounds", "0"], "--rounds"),
        (["--minutes", "-1"], "--minutes"),
        (["--threads", "0"], "--threads"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--dtype", "int3"], "--dtype"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--draft-model", "nowhere"], "none of the methods needs it"),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(run, usual, monkeypatch, options, said):
    monkeypatch.setattr(command, "load", lambda *arguments: pytest.fail("the model was loaded"))
    code, out, err = run(*usual, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("treedec: error: ") and said in err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "empty"),
        ([line(1), line(1)], "line 2: question_id '1' appears twice, first in line 1"),
        (['{"question_id": 1, "category": "qa"}'], "line 1: the key 'turns' is missing"),
    ],
)
def test_broken_prompt_files_are_named(run, usual, prompt_file, lines, said):
    path = prompt_file(*lines)
    code, out, err = run(*usual)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err and said in err


def test_without_out_there_is_nowhere_to_write(run, monkeypatch):
    monkeypatch.setattr(command, "load", lambda *arguments: pytest.fail("the model was loaded"))
    code, _, err = run("--methods", "hf")
    assert code == 2 and "give --out FILE" in err


def test_reports_are_made_of_results(run, usual, monkeypatch, tmp_path):
    run(*usual, "--methods", "hf,ngram")
    seen = []

    def render(*arguments):
        seen.append(arguments)
        return "# Report"

    monkeypatch.setitem(sys.modules, "treedec.benchmarks.report", SimpleNamespace(render=render))
    path = tmp_path / "out" / "r.json"
    code, out, err = run("report", path, path, "--out", tmp_path / "report", "--baseline", "ar")
    assert (code, out) == (0, "# Report\n"), err
    assert seen == [([read_result(path)] * 2, tmp_path / "report", "ar", False)]


def test_a_report_of_a_file_cut_short_is_one_line(run, tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"schema": 3, "rows": [')
    code, out, err = run("report", path, "--out", tmp_path / "report")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err and "cut short" in err


def test_threads_are_set(monkeypatch, usual, run):
    asked = []
    monkeypatch.setattr(bench_module.torch, "set_num_threads", asked.append)
    assert run(*usual, "--methods", "ar", "--threads", 3)[0] == 0
    assert asked == [3]
