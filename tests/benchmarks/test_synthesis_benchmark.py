"""The benchmark of synthesis: what it times, and what its last line says."""

from __future__ import annotations

import json

import pytest
import torch
from letters import letters, tiny_model

from treedec.benchmarks import synthesis
from treedec.training.synth import Synthesizer
from treedec.training.synth_answers import Answerer


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    letters().save_pretrained(path)
    return path


@pytest.mark.parametrize("answering", [False, True])
def test_both_are_timed_in_turn_over_the_same_rows(chatty, tmp_path, monkeypatch, capsys, answering):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(["abc", "a" * 60, "bad", "cafe", "de", "egg"]))
    events = []

    def timed(work, device):
        result = work()
        events.append(result if isinstance(result, int) else [len(sample["input_ids"]) for sample in result])
        return 2.0 if isinstance(result, int) else 4.0, result

    monkeypatch.setattr(synthesis, "_timed", timed)
    arguments = ["--target", str(chatty), "--rows", "2", "--length", "40", "--rounds", "2", "--answer-tokens", "5"]
    arguments += ["--prompts", str(prompts), "--conversations", "4"] if answering else []
    assert synthesis.main(arguments) == 0
    assert [isinstance(event, int) for event in events] == [False, True, False, True]
    written, read = events[0], events[1]
    assert len(written) == (4 if answering else 2) and read == 2 * max(written)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rates = [(sum(one) / 4, other / 2) for one, other in (events[:2], events[2:])]
    assert result["ratio"] == pytest.approx(sum(ours / own for ours, own in rates) / 2, abs=1e-3)
    assert result["forward"] == pytest.approx(sum(own for _, own in rates) / 2, abs=0.1)
    assert (result["rows"], result["rounds"]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--rows", "0"], "--rows"), (["--prompts", "PROMPTS", "--length", "4"], "no prompt to answer")],
)
def test_mistakes_are_one_line(chatty, tmp_path, capsys, monkeypatch, arguments, said):
    for kind in (Synthesizer, Answerer):
        monkeypatch.setattr(kind, "batch", lambda *arguments: pytest.fail("it was begun"))
    (tmp_path / "prompts.txt").write_text("abcdefg\n")
    places = {"PROMPTS": str(tmp_path / "prompts.txt")}
    code = synthesis.main(["--target", str(chatty), *(places.get(part, part) for part in arguments)])
    shown = capsys.readouterr()
    assert code == 2 and said in shown.err and shown.out == ""
