"""Training as a whole: heads learn their offsets, and the target stays what it was (A21)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_runs import (
    HIDDEN,
    QUIET,
    config_of,
    contents,
    corpus_of,
    counting_model,
    random_samples,
    state_of,
    tiny_model,
)

from treedec.heads.checkpoint import load_heads
from treedec.target import Target
from treedec.training import processes
from treedec.training.contracts import Learner, Losses
from treedec.training.evaluation import Evaluator
from treedec.training.learners import LEARNERS, LearnerType
from treedec.training.losses import DraftHead, draft_logits
from treedec.training.packs import pack, supervised_counts
from treedec.training.plan import plan, render
from treedec.training.trainer import check, train

DATA = corpus_of(random_samples())
#: Cycles of 23 tokens, two responses each.
COUNTING = corpus_of([([(start + i) % 23 for i in range(30)], [(5, 18), (20, 30)]) for start in range(46)])
HEADS = [method for method in LEARNERS if method not in ("medusa2", "draft-model")]


def metrics_of(out):
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.parametrize("method", HEADS)
def test_every_method_learns_its_own_offsets(tmp_path, method):
    rate = 0.05 if method == "medusa" else 0.02
    config = config_of(method=method, draft_vocab_size=23, epochs=12, pack_tokens=256, learning_rate=rate)
    measured = train(counting_model(), None, COUNTING, tmp_path / "out", config, console=QUIET)
    depths = len(measured["accuracy"])
    assert measured["accuracy"] == measured["top1"] == [1.0] * depths
    # The target would write these texts itself, so all runs are greedy; each pass but the last accepts all depths.
    assert measured["greedy_runs"] == measured["runs"] == 18
    depths = max(depths, 5) if method == "eagle" else depths  # trained on one, it drafts as far
    tokens, passes = 9 * (12 + 9), 9 * (-(-12 // (depths + 1)) + -(-9 // (depths + 1)))
    assert measured["accepted_length"] == measured["accepted_length_greedy"] == tokens / passes
    history = metrics_of(tmp_path / "out")["history"]
    assert history[-1]["loss"] < history[0]["loss"] / 3


def test_what_was_learnt_is_what_is_written(tmp_path):
    model = counting_model()
    config = config_of(draft_vocab_size=23, epochs=12, pack_tokens=256, learning_rate=0.05)
    train(model, None, COUNTING, tmp_path / "out", config, console=QUIET)
    heads = load_heads(tmp_path / "out" / "heads", model)
    hidden = Target(model).features(torch.arange(23)[None])[0]
    scores = draft_logits(heads(hidden), DraftHead.of(model, heads.draft_ids))
    for k in range(3):
        assert heads.draft_ids[scores[k].argmax(-1)].tolist() == [(x + 2 + k) % 23 for x in range(23)]


@pytest.mark.parametrize("method", HEADS)
def test_heads_go_on_from_those_of_another_run(tmp_path, method):
    """One step at a rate of almost nothing leaves them as good as they were; what they draft is chosen anew."""
    model = counting_model()
    rate = 0.05 if method == "medusa" else 0.02
    config = config_of(method=method, draft_vocab_size=23, epochs=12, pack_tokens=256, learning_rate=rate)
    first = train(model, None, COUNTING, tmp_path / "first", config, console=QUIET)
    later = replace(config, initial_heads=str(tmp_path / "first" / "heads"), learning_rate=1e-9, max_steps=1)
    before = contents(tmp_path / "first")
    again = train(model, None, COUNTING, tmp_path / "again", later, console=QUIET)
    assert contents(tmp_path / "first") == before
    assert again["top1"] == first["top1"]
    fresh = train(model, None, COUNTING, tmp_path / "fresh", replace(later, initial_heads=None), console=QUIET)
    assert sum(fresh["top1"]) < sum(again["top1"]) - 0.5
    train(model, None, COUNTING, tmp_path / "fewer", replace(later, draft_vocab_size=20), console=QUIET)
    one, two = (load_heads(tmp_path / run / "heads", model) for run in ("first", "fewer"))
    assert len(two.draft_ids) == 20
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(two.state_dict()[name], parameter, rtol=1e-3, atol=1e-6)  # written in float16


def test_a_resumed_run_does_not_need_its_initial_heads(tmp_path):
    model = counting_model()
    config = config_of(draft_vocab_size=23, pack_tokens=256)
    train(model, None, COUNTING, tmp_path / "first", config, console=QUIET)
    later = replace(config, initial_heads=str(tmp_path / "first" / "heads"))
    measured = train(model, None, COUNTING, tmp_path / "again", later, console=QUIET)
    shutil.rmtree(tmp_path / "first")
    assert train(model, None, COUNTING, tmp_path / "again", later, resume=True, console=QUIET) == measured


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hydra"}, "holds medusa heads, not those of hydra"),
        ({"method": "medusa", "options": {"heads": 2}}, "have heads 3, not 2; give the options"),
        ({"method": "draft-model"}, "not for draft-model; there is its option 'model'"),
    ],
)
def test_initial_heads_of_another_kind_are_refused_before_any_work(tmp_path, options, message):
    model = counting_model()
    train(model, None, COUNTING, tmp_path / "first", config_of(draft_vocab_size=23, max_steps=1), console=QUIET)
    config = config_of(**{"options": {}, **options}, initial_heads=str(tmp_path / "first" / "heads"))
    with pytest.raises(ValueError, match=message):
        train(model, None, COUNTING, tmp_path / "again", config, console=QUIET)
    with pytest.raises(ValueError, match=message):
        check(model, None, config)
    assert not (tmp_path / "again" / "heads").exists() and not (tmp_path / "again" / "features").exists()


def test_a_folder_without_initial_heads_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no heads in {tmp_path}"):
        check(counting_model(), None, config_of(initial_heads=str(tmp_path)))


def test_the_first_boundary_is_learnt_and_the_prompt_is_not(tmp_path):
    """Token 0 opens every answer and occurs nowhere else: only the last prompt token can teach what follows it."""
    model = counting_model()
    texts = [[7 + i % 3, 9, 0, 1, 2, 3, 4, 5, 6, 12 + i % 5, 20, 21] for i in range(24)]
    config = config_of(draft_vocab_size=23, epochs=60, learning_rate=0.05, pack_tokens=512)
    train(model, None, corpus_of([(text, [(2, 9)]) for text in texts]), tmp_path / "out", config, console=QUIET)
    heads = load_heads(tmp_path / "out" / "heads", model)
    vector = Target(model).features(torch.arange(23)[None])[0]
    scores = draft_logits(heads(vector), DraftHead.of(model, heads.draft_ids)).argmax(-1)
    # State 9 (the last of the prompt) is followed by 0, whose own prediction, 1, is what head 0 must say.
    assert scores[:, 9].tolist() == [1, 2, 3]
    weight = heads.weight.detach().abs().sum((1, 2))
    outside = [7, 8, 12, 14, 16, 20, 21]  # columns that only states outside the responses reach
    assert float(weight[:, outside].max()) == 0 < float(weight[:, 9].min())


def hooks_of(module):
    return len(module._forward_hooks), len(module._forward_pre_hooks)


@pytest.mark.parametrize("method", LEARNERS)
def test_everything_is_trained_and_the_target_is_not(tmp_path, method, monkeypatch):
    model = tiny_model()
    model.lm_head.weight.requires_grad_(False)
    # At the first such call, transformers notes in the model how it collects hidden states.
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: one.requires_grad for name, one in model.named_parameters()}
    stored = {name: (set(vars(module)), hooks_of(module)) for name, module in model.named_modules()}
    begun = {}
    build = LEARNERS[method].build

    def remembering(*arguments, **named):
        learner = build(*arguments, **named)
        begun.update({name: one.detach().clone() for name, one in learner.named_parameters() if one.requires_grad})
        return learner

    monkeypatch.setattr(
        "treedec.training.learners.LEARNERS", {method: LearnerType(LEARNERS[method].options, remembering)}
    )
    options = {"draft-model": {"layers": 1}}.get(method, {})  # a copy of all layers has nothing to learn
    config = config_of(method=method, options=options, weight_decay=0.0)
    train(model, None, DATA, tmp_path / "out", config, console=QUIET)
    weights = state_of(tmp_path / "out")["weights"]
    assert weights.keys() == begun.keys() and len(weights) > 0
    for name, value in weights.items():
        assert value.dtype == torch.float32 and not torch.equal(value, begun[name]), name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: one.requires_grad for name, one in model.named_parameters()} == flags
    assert all(one.grad is None for one in model.parameters()) and not model.training
    assert {name: (set(vars(module)), hooks_of(module)) for name, module in model.named_modules()} == stored


def test_a_bfloat16_target_gets_float32_masters(tmp_path):
    measured = train(tiny_model().to(torch.bfloat16), None, DATA, tmp_path / "out", config_of(), console=QUIET)
    (weight, *_) = state_of(tmp_path / "out")["weights"].values()
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
    assert measured["mean_loss"] < 10


@pytest.mark.parametrize("precision", ["auto", "fp16", "bf16"])
def test_a_float16_target_can_be_trained_for(tmp_path, precision):
    config = config_of(precision=precision, epochs=1)
    measured = train(tiny_model().to(torch.float16), None, DATA, tmp_path / "out", config, console=QUIET)
    weights = state_of(tmp_path / "out")["weights"].values()
    assert all(one.isfinite().all() and one.abs().sum() > 0 for one in weights) and measured["mean_loss"] < 10


def test_a_float16_target_is_adapted_with_loss_scaling(tmp_path):
    """Its gradients lie below the smallest numbers of float16."""
    config = config_of(method="medusa2", options={"warmup": 0.0}, epochs=1)
    train(tiny_model().to(torch.float16), None, DATA, tmp_path / "out", config, console=QUIET)
    state = state_of(tmp_path / "out")
    adapter = [one for name, one in state["weights"].items() if name.startswith("adapter")]
    assert state["scaler"]["scale"] > 1 and all(one.isfinite().all() and one.any() for one in adapter)
    with pytest.raises(ValueError, match="vanish in a float16 target"):
        train(
            tiny_model().to(torch.float16), None, DATA, tmp_path / "no", replace(config, precision="no"), console=QUIET
        )


def test_what_is_measured(tmp_path):
    """Untrained heads repeat the target's next token: agreement and divergence are then known from its states alone."""
    model = tiny_model()
    config = config_of(learning_rate=1e-30, epochs=1, eval_nodes=1)
    measured = train(model, None, DATA, tmp_path / "out", config, console=QUIET)
    heads = load_heads(tmp_path / "out" / "heads", model)
    assert heads.weight.abs().max() < 1e-20
    ids = heads.draft_ids.tolist()
    hits, top, loss, count, covered, responses = [0] * 3, [0] * 3, [0.0] * 3, [0] * 3, 0, 0
    for text, spans in random_samples()[-4:]:  # the last fifth
        with torch.no_grad():
            drafts = model(torch.tensor([text])).logits[0][:, heads.draft_ids].log_softmax(-1)
        for start, end in spans:
            covered += sum(token in ids for token in text[start:end])
            responses += end - start
            for k in range(3):
                for read in range(start - 1, end - 1 - k - 1):
                    teacher = read + 1 + k
                    hits[k] += int(drafts[read].argmax() == drafts[teacher].argmax())
                    best = heads.draft_ids[drafts[read].argsort(descending=True)[:4]].tolist()
                    top[k] += text[read + 2 + k] in best
                    loss[k] += float((drafts[teacher].exp() * (drafts[teacher] - drafts[read])).sum())
                    count[k] += 1
    assert measured["counts"] == count
    assert measured["accuracy"] == pytest.approx([a / n for a, n in zip(hits, count, strict=True)])
    assert measured["top4"] == pytest.approx([a / n for a, n in zip(top, count, strict=True)]) and sum(top) > 0
    assert measured["loss"] == pytest.approx([a / n for a, n in zip(loss, count, strict=True)], rel=1e-4)
    assert measured["mean_loss"] == pytest.approx(sum(loss) / sum(count), rel=1e-4)
    assert measured["coverage"] == pytest.approx(covered / responses) and 0 < measured["coverage"] < 1
    assert measured["heldout_positions"] == count[0] and measured["accepted_length"] == 1.0
    assert measured["accepted_length_greedy"] is None and measured["runs"] == 8
    assert metrics_of(tmp_path / "out")["final"] == measured


def test_more_nodes_accept_more(tmp_path):
    lengths = []
    for nodes in (1, 4, 16):
        config = config_of(epochs=1, eval_nodes=nodes)
        measured = train(tiny_model(), None, DATA, tmp_path / str(nodes), config, console=QUIET)
        lengths.append(measured["accepted_length"])
    assert lengths[0] == 1.0 < lengths[1] < lengths[2]


def test_masked_and_short_samples_are_counted_and_change_nothing(tmp_path):
    plain = train(tiny_model(), None, DATA, tmp_path / "plain", config_of(), console=QUIET)
    samples = random_samples()
    masked, short = (list(range(24)), []), ([1, 2, 3], [(1, 2)])
    mixed = corpus_of([*samples, masked, short, masked], skipped=2)
    measured = train(tiny_model(), None, mixed, tmp_path / "mixed", config_of(), console=QUIET)
    assert (plain["idle_conversations"], plain["skipped_samples"]) == (0, 0)
    assert {**plain, "idle_conversations": 3, "skipped_samples": 2} == measured


def test_a_step_is_the_gradient_of_its_packs_together(tmp_path):
    """Accumulated over packs or taken at once, a step is the same: it weighs positions, not packs."""
    results = []
    for number, (tokens, packs) in enumerate([(24, 99), (9999, 1)]):
        config = config_of(pack_tokens=tokens, packs_per_step=packs, epochs=3)
        train(tiny_model().double(), None, DATA, tmp_path / str(number), config, console=QUIET)
        state = state_of(tmp_path / str(number))
        assert state["step"] == 3
        results.append(state)
    for name, value in results[0]["weights"].items():
        torch.testing.assert_close(value, results[1]["weights"][name], rtol=0, atol=1e-12)
    assert results[0]["history"][0]["loss"] == pytest.approx(results[1]["history"][0]["loss"], rel=1e-12)


def test_weights_of_depths_scale_the_gradient(tmp_path):
    config = config_of(depth_weights=(1.0, 0.0, 1.0), weight_decay=0.0)
    train(tiny_model(), None, DATA, tmp_path / "out", config, console=QUIET)
    moved = state_of(tmp_path / "out")["weights"]["heads.weight"].flatten(1).abs().sum(1)
    assert float(moved[1]) == 0 < float(moved[[0, 2]].min())
    with pytest.raises(ValueError, match="depth_weights has 2 weights, but with these options medusa has 3 depths"):
        train(tiny_model(), None, DATA, tmp_path / "two", config_of(depth_weights=(1.0, 1.0)), console=QUIET)


def test_only_matrices_decay(tmp_path):
    """Medusa's biases are one tensor for all heads."""
    train(tiny_model(), None, DATA, tmp_path / "out", config_of(weight_decay=0.5, epochs=1), console=QUIET)
    state = state_of(tmp_path / "out")
    assert [tuple(one.shape) for one in state["weights"].values()] == [(3, 1, HIDDEN, HIDDEN), (3, 1, HIDDEN)]
    decays = [(group["weight_decay"], group["params"]) for group in state["optimizer"]["param_groups"]]
    assert decays == [(0.5, [0]), (0.0, [1])]


def test_online_features_train_the_same(tmp_path):
    stored = train(tiny_model(), None, DATA, tmp_path / "stored", config_of(method="eagle3"), console=QUIET)
    config = config_of(method="eagle3", features="online")
    assert train(tiny_model(), None, DATA, tmp_path / "online", config, console=QUIET) == stored
    assert not (tmp_path / "online" / "features").exists()


def test_runs_can_share_features(tmp_path, monkeypatch):
    config = config_of(features_folder=str(tmp_path / "features"), epochs=1)
    first = train(tiny_model(), None, DATA, tmp_path / "first", config, console=QUIET)
    monkeypatch.setattr("treedec.training.features.compute", lambda *_: pytest.fail("computed again"))
    second = train(tiny_model(), None, DATA, tmp_path / "second", replace(config, learning_rate=2e-3), console=QUIET)
    assert first["mean_loss"] != second["mean_loss"] and not (tmp_path / "second" / "features").exists()


def test_max_steps_ends_in_mid_epoch(tmp_path):
    config = config_of(epochs=9, max_steps=7, eval_every=3)
    measured = train(tiny_model(), None, DATA, tmp_path / "out", config, console=QUIET)
    assert measured["steps"] == 7
    assert [one["step"] for one in metrics_of(tmp_path / "out")["evaluations"]] == [3, 6, 7]


def test_the_best_heads_are_written_at_once(tmp_path, monkeypatch):
    lengths, losses = iter([1.1, 1.9, 1.9, 1.9]), iter([3.0, 3.0, 2.0, 2.0])
    original, seen = Evaluator.measure, []

    def measure(evaluator, learner):
        if seen:
            heads = load_heads(tmp_path / "out" / "heads", tiny_model())
            seen[-1] = (seen[-1], heads.weight.clone())
        seen.append(learner.heads.weight.detach().clone())
        return {**original(evaluator, learner), "accepted_length": next(lengths), "mean_loss": next(losses)}

    monkeypatch.setattr(Evaluator, "measure", measure)
    measured = train(tiny_model(), None, DATA, tmp_path / "out", config_of(epochs=4), console=QUIET)
    assert (measured["accepted_length"], measured["mean_loss"], measured["step"]) == (1.9, 2.0, 15)
    for weight, written in seen[:3]:  # each was better than those before
        assert torch.equal(written, weight.half().float())
    final = load_heads(tmp_path / "out" / "heads", tiny_model()).weight
    assert torch.equal(final, seen[2][1]) and not torch.equal(final, seen[3].half().float())
    about = json.loads((tmp_path / "out" / "heads" / "config.json").read_text())["training"]
    assert about["config"]["options"] == {"heads": 3, "blocks": 1} and about["metrics"]["step"] == 15


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(tiny_model(), None, DATA, tmp_path / "a", config_of(method="eagle", epochs=1), console=QUIET)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    train(tiny_model(), None, DATA, tmp_path / "b", config_of(method="eagle", epochs=1), console=QUIET)
    weights = [state_of(tmp_path / name)["weights"] for name in "ab"]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Silent(Learner):
    """Uses one of its two parameters, and that only in packs of several conversations."""

    method, depths = "silent", 1

    def __init__(self, draft_ids):
        super().__init__()
        self.draft_ids = draft_ids
        self.used, self.unused = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(()))

    def forward(self, batch):
        mask = batch.supervised(1)
        counts = mask.sum()[None]
        return Losses(self.used * counts, counts * 0, counts)

    def ranks(self, batch, top):
        return torch.full((1, *batch.input_ids.shape), top)

    def save(self, folder, training, overwrite=False):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"format": "treedec"}')


def test_a_parameter_that_nothing_uses_is_left_alone(tmp_path, monkeypatch):
    kind = LearnerType(LEARNERS["medusa"].options, lambda model, options, draft_ids, labels: Silent(draft_ids))
    monkeypatch.setattr("treedec.training.learners.LEARNERS", {"medusa": kind})
    measured = train(tiny_model(), None, DATA, tmp_path / "out", config_of(weight_decay=0.0), console=QUIET)
    weights = state_of(tmp_path / "out")["weights"]
    assert float(weights["unused"]) == 1 > float(weights["used"]) and measured["accepted_length"] == 1.0


def test_a_target_in_training_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        train(tiny_model().train(), None, DATA, tmp_path / "out", config_of(), console=QUIET)
    assert not (tmp_path / "out").exists()


def test_one_conversation_is_not_enough(tmp_path):
    with pytest.raises(ValueError, match="1 of 1 conversations"):
        train(tiny_model(), None, corpus_of(random_samples(1)), tmp_path / "out", config_of(), console=QUIET)


class Tokenizer:
    """As much of one as training reads."""

    eos_token_id = 93


def test_eos_can_always_be_drafted(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = [95, 96]
    train(model, Tokenizer(), DATA, tmp_path / "out", config_of(draft_vocab_size=5, epochs=1), console=QUIET)
    assert {93, 95, 96} <= set(load_heads(tmp_path / "out" / "heads", model).draft_ids.tolist())


def test_tensorboard_gets_what_the_history_holds(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tiny_model(), None, DATA, tmp_path / "out", config_of(tensorboard=True), console=QUIET)
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "logs"))
    events.Reload()
    metrics = metrics_of(tmp_path / "out")
    logged = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert logged == [(entry["step"], pytest.approx(entry["loss"])) for entry in metrics["history"]]
    top = [event.value for event in events.Scalars("heldout/top8/2")]
    assert top == pytest.approx([one["top8"][2] for one in metrics["evaluations"]])


def test_a_plan_counts_what_a_run_does_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, model = config_of(method="eagle3", eval_every=4), tiny_model()
    planned = plan(model, DATA, config)
    assert contents(tmp_path) == {} and str(render(planned))
    measured = train(model, None, DATA, tmp_path / "out", config, console=QUIET)
    for name in ("steps", "coverage", "positions", "heldout_positions", "parameters", "idle_conversations"):
        assert planned[name] == measured[name], name
    assert planned["evaluations"] == len(metrics_of(tmp_path / "out")["evaluations"]) == 3
    index = json.loads((tmp_path / "out" / "features" / "index.json").read_text())
    assert planned["feature_bytes"] == index["totals"]["bytes"] and planned["tokens"] == index["totals"]["positions"]
    assert planned["learner_bytes"] == 16 * planned["parameters"] and planned["activation_bytes"] > 0
    assert planned["seconds"] > 0 and plan(model, DATA, config_of(features="online"))["feature_bytes"] == 0
    with pytest.raises(ValueError, match="not a multiple of the 2 processes"):
        plan(model, DATA, config, processes=2)


class Place:
    """As much of an accelerator as tells processes apart."""

    def __init__(self, process_index, num_processes):
        self.process_index, self.num_processes = process_index, num_processes


@pytest.mark.parametrize("items", [1, 2, 5, 6])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_all_processes_take_equally_many_and_each_item_counts_once(items, number):
    taken = [processes.shares(items, Place(index, number)) for index in range(number)]
    assert len({len(one) for one in taken}) == 1
    assert sorted(place for one in taken for place, valid in one if valid) == list(range(items))
    assert all(place % number == index for index, one in enumerate(taken) for place, valid in one if valid)


def test_counts_are_known_beforehand():
    packs = pack(DATA, 80, 0.2)
    counts = supervised_counts(DATA, packs, 3, 1)
    runs = [np.diff(span)[0] for _, spans in random_samples() for span in spans]
    assert counts.sum(0).tolist() == [sum(max(length - 1 - k, 0) for length in runs) for k in range(3)]
