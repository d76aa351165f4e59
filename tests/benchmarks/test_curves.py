"""Learning curves of runs as pictures."""

import json

import pytest

from treedec.benchmarks import curves


def metrics(positions=100, depths=2, evaluations=3):
    evaluated = [
        {
            "step": 10 * (n + 1),
            "loss": [2.0 / (n + 1)] * depths,
            "accuracy": [0.1 * (n + 1)] * depths,
            "top1": [0.1] * depths,
            "accepted_length": 1.0 + n,
            "accepted_length_greedy": None if n == 0 else 2.0 + n,
        }
        for n in range(evaluations)
    ]
    history = [{"step": n, "losses": [1.0] * depths, "accuracy": [0.5] * depths} for n in (5, 10, 15)]
    final = {**evaluated[-1], "positions": positions}
    return {"evaluations": evaluated, "history": history, "final": final, "config": {"eval_nodes": 16}}


def lines(panel):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in panel.get_lines()}


def test_one_run_over_its_steps():
    losses, accuracies, lengths = curves.over_steps(metrics()).axes
    assert lines(losses)["depth 2"] == [(10, 2.0), (20, 1.0), (30, 2 / 3)]
    assert len(accuracies.get_lines()) == 4  # training and held out, at two depths
    assert lines(lengths) == {
        "all held-out text": [(10, 1.0), (20, 2.0), (30, 3.0)],
        "greedy held-out text": [(20, 3.0), (30, 4.0)],
    }


def test_several_runs_over_their_data():
    _, lengths = curves.over_positions([metrics(400), metrics(100, evaluations=2)]).axes
    assert lines(lengths)["all held-out text"] == [(100, 2.0), (400, 3.0)]


def test_the_command_writes_a_picture(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps(metrics()))
    for runs in (["a"], ["a", "b/metrics.json"]):
        out = tmp_path / f"{len(runs)}.png"
        assert curves.main([*(str(tmp_path / run) for run in runs), "--out", str(out)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"evaluations": [], "history": [], "final": {}}'])
def test_what_is_no_run_is_named(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "metrics.json").write_text(text)
    assert curves.main([str(tmp_path), "--out", str(tmp_path / "out.png")]) == 2
    assert str(tmp_path / "metrics.json") in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()
