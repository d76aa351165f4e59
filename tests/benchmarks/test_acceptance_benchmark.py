"""The acceptance benchmark on a tiny random model: where its distributions come from, and what it writes."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from kit import VOCAB, prompts, tiny_model

from treedec import BestFirst, MedusaDrafter, Target
from treedec.benchmarks import acceptance
from treedec.benchmarks.acceptance import Measurement, concatenated, figures, spread
from treedec.bounds import acceptance_bounds
from treedec.heads import MedusaConfig, MedusaHeads
from treedec.heads.checkpoint import save_heads
from treedec.models import Fingerprint, load_target

DRAFT_IDS = torch.arange(1, VOCAB, 3)


def untrained_heads():
    """Heads that repeat the target's own prediction, in a trimmed vocabulary."""
    return MedusaHeads(MedusaConfig(32, VOCAB, 2, 1, len(DRAFT_IDS)), DRAFT_IDS)


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the benchmark in this process, without a GPU: `run(*arguments) -> (exit code, stdout, stderr)`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        code = acceptance.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def questions(prompt_file):
    rows = ({"question_id": i, "category": "c", "turns": [f"w{i} w2 w{i} w4"]} for i in range(1, 6))
    return prompt_file(*map(json.dumps, rows))


def test_items_are_spread():
    assert spread(range(10), 2) == [2, 7] and spread(range(10), 1) == [5]
    assert spread(range(3), 8) == [0, 1, 2] and spread([], 4) == []
    assert len(set(spread(range(100), 7))) == 7


def test_distributions_are_those_of_the_target_and_of_what_drafted_at_the_same_place():
    model, length = tiny_model(), 12
    drafter = MedusaDrafter(untrained_heads().double(), model, BestFirst())
    text = prompts(length=20)
    p, q = Measurement(Target(model), None, drafter, positions=99, max_new_tokens=8, seed=0).distributions(
        text, length, temperature=0.7
    )
    logits = model(text).logits[0].float() / 0.7
    roots = range(12, 19)  # the last token may have ended the text
    torch.testing.assert_close(p, logits[roots].softmax(-1))
    # An untrained head guesses, from where the root was predicted, the root again.
    own = torch.full_like(logits, -torch.inf)
    own[:, DRAFT_IDS] = logits[:, DRAFT_IDS]
    torch.testing.assert_close(q, own[range(11, 18)].softmax(-1))


def test_figures_are_means_over_all_nodes():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 6, 9, generator=generator).softmax(-1)
    parts = [acceptance_bounds(p[:2], q[:2], 4, draws=8), acceptance_bounds(p[2:], q[2:], 4, draws=8)]
    entries = {(entry["way"], entry["children"]): entry for entry in figures(concatenated(parts), [1, 4])}
    assert len(entries) == 5 * 2
    top = p.gather(1, q.topk(4).indices).sum(1)
    assert entries["top", 4]["acceptance"] == pytest.approx(float(top.mean()), abs=1e-6)
    assert entries["top", 4]["acceptance_error"] == pytest.approx(float(top.std()) / 6**0.5, abs=1e-6)
    assert entries["residual", 1]["below_optimum"] == pytest.approx(0, abs=1e-6)
    assert entries["optimum", 4]["below_optimum"] == 0 < entries["residual", 4]["below_optimum"]
    lone = figures(acceptance_bounds(p[:1], q[:1], 1), [1])
    assert lone[0]["acceptance_error"] is None


def test_a_benchmark_from_end_to_end(run, folder, questions, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["acceptance.py", str(questions), "--limit", "3"])
    model, _ = load_target(folder)
    save_heads(tmp_path / "heads", untrained_heads(), Fingerprint.of(model), {})
    out, results = tmp_path / "new" / "result.json", []
    for _ in range(2):
        code, shown, err = run(
            questions, "--target", folder, "--drafter", tmp_path / "heads", "--limit", 3, "--positions", 4,
            "--max-new-tokens", 12, "--temperature", 1, "--temperature", 0.5, "--children", 1, "--children", 3,
            "--draws", 16, "--out", out,
        )  # fmt: skip
        assert code == 0, err
        results.append(json.loads(out.read_text(), parse_constant=pytest.fail))
    assert results[0]["summary"] == results[1]["summary"]
    assert results[0]["command"] == f"python -m treedec.benchmarks.acceptance {questions.name} --limit 3"
    assert results[0]["machine"]["device"] == "cpu"
    assert shown.count("| optimum, drawn |") == 2 and "12 positions" in shown
    assert {entry["positions"] for entry in results[0]["summary"]} == {12}
    for temperature in (1.0, 0.5):
        by_way = {
            entry["way"]: entry["acceptance"]
            for entry in results[0]["summary"]
            if entry["temperature"] == temperature and entry["children"] == 3
        }
        assert set(by_way) == {"coupled", "residual", "top", "hu", "optimum"}
        assert 0 < by_way["residual"] < by_way["optimum"] < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--children", "0"], "--children"),
        (["--limit", "0"], "--limit"),
        (["--draws", "1"], "--draws"),
        (["--category", "rag"], "no category 'rag'"),
        (["--out", "FOLDER"], "is a folder"),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(run, questions, tmp_path, monkeypatch, options, said):
    monkeypatch.setattr(acceptance, "load", lambda *arguments: pytest.fail("the model was loaded"))
    code, out, err = run(questions, *(str(tmp_path) if option == "FOLDER" else option for option in options))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("treedec: error: ") and said in err


def test_drafters_without_distributions_are_refused(run, folder, questions):
    code, out, err = run(questions, "--target", folder, "--drafter", "ngram")
    assert (code, out) == (2, "") and "--drafter ngram has no Medusa heads" in err
