"""Medusa-2: the two stages, what each trains, and a target that stays as it was while a twin of it is adapted."""

from __future__ import annotations

import copy
import json
import sys

import peft
import pytest
import torch
from kit import VOCAB, fresh_model, hooks, prompts, reference, tiny_model
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import treedec
from treedec.heads import MedusaDrafter
from treedec.target import Target
from treedec.training.contracts import Batch
from treedec.training.learners import LEARNERS
from treedec.training.learners.medusa2 import ADAPTER_FOLDER, Medusa2Learner, Medusa2Options

EVERY = torch.arange(VOCAB)
FEW = torch.arange(0, VOCAB, 3)


def batch_of(model, ids=None, runs=((0, 2, 12), (1, 0, 4), (1, 5, 8))):
    ids = prompts(2, 14) if ids is None else ids
    marked = torch.full(ids.shape, -1)
    for number, (row, begin, end) in enumerate(runs):
        marked[row, begin:end] = number
    return Batch(ids, torch.full((len(ids),), ids.shape[1]), marked, Target(model).features(ids))


def learner_for(target, labels="soft", draft_ids=EVERY, **options):
    options = {"heads": 3, "rank": 4, "alpha": 8, "dropout": 0.0} | options
    return Medusa2Learner.build(target, Medusa2Options(**options), draft_ids, labels=labels)


def steps(learner, batch, number, progress, lr=3e-3):
    """Train as the trainer does; the KL per position at each depth before each step."""
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)
    seen = []
    for _ in range(number):
        learner.at(progress)
        losses = learner(batch)
        means = losses.sums / losses.counts
        loss = means.sum() + (0 if losses.extra is None else losses.extra / losses.counts[0])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        seen.append(means.tolist())
    return seen


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def changed(before, module):
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def counting_model(size=16):
    """A float64 target that says x + 1 after x: its layers add little, its LM head reads the embedding before."""
    model = fresh_model("llama", vocab_size=size)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1)
        model.lm_head.weight.copy_(2 * rows.roll(1, dims=0))
    return model


def test_it_is_registered():
    kind = LEARNERS["medusa2"]
    learner = kind.build(tiny_model(), kind.options(), FEW, labels="hard")
    assert (learner.method, learner.depths, learner.offset) == ("medusa2", 4, 1)
    assert torch.equal(learner.draft_ids, FEW)


def test_only_heads_and_adapter_are_its_parameters():
    learner = learner_for(tiny_model())
    names = set(learner.state_dict())
    assert names == {"heads.weight", "heads.bias", "heads.draft_ids"} | {f"adapter.{i}" for i in range(28)}
    assert all(parameter.requires_grad for parameter in learner.parameters())


@pytest.mark.parametrize(("dtype", "master"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_masters(dtype, master):
    model = fresh_model(dtype=dtype)
    learner = learner_for(model)
    learner.at(1.0)
    losses = learner(batch_of(model))
    (losses.sums.sum() + losses.extra).backward()
    assert {parameter.dtype for parameter in learner.parameters()} == {master}
    assert all(bool(p.grad.isfinite().all()) for p in learner.parameters())


def test_the_same_seed_makes_the_same_learner():
    def made():
        torch.manual_seed(5)
        return learner_for(tiny_model())

    one = made()
    assert changed(state_of(one), made()) == set() and any(bool((part != 0).any()) for part in one.adapter)


def test_the_first_stage_trains_heads_only_and_needs_no_pass(monkeypatch):
    model = fresh_model()
    batch, learner = batch_of(model), learner_for(model, warmup=0.5)
    before = state_of(learner)
    with monkeypatch.context() as patched:
        patched.setattr(Target, "states", None)
        steps(learner, batch, 3, progress=0.49)
    assert changed(before, learner) == {"heads.weight", "heads.bias"}
    assert all(parameter.grad is None for parameter in learner.adapter)
    learner.at(0.49)
    assert learner(batch).extra is None


def test_the_second_stage_reaches_everything():
    model = fresh_model()
    batch, learner = batch_of(model), learner_for(model, warmup=0.5)
    before = state_of(learner)
    steps(
        learner, batch, 2, progress=0.5
    )  # at first the second factor of each product is zero, and so what the first gets
    assert changed(before, learner) == set(before) - {"heads.draft_ids"}
    assert all(bool((parameter.grad != 0).any()) for parameter in learner.parameters())


def test_the_second_stage_starts_where_the_first_one_ends():
    model = tiny_model()
    batch, learner = batch_of(model), learner_for(model)
    steps(learner, batch, 3, progress=0.0)
    learner.at(0.0)
    first = learner(batch)
    learner.at(1.0)
    second = learner(batch)
    torch.testing.assert_close(second.sums, first.sums)
    assert abs(second.extra.item()) < 1e-9, "an adapter that adds nothing says what the target says"
    learner.eval()
    torch.testing.assert_close(learner(batch).sums, first.sums)


def test_what_is_evaluated_is_the_adapted_target_in_any_stage():
    model = tiny_model()
    batch, learner = batch_of(model), learner_for(model)
    steps(learner, batch, 3, progress=1.0)
    expected, ranks = learner(batch), learner.ranks(batch, 9)
    learner.at(0.0)
    learner.eval()
    assert torch.equal(learner(batch).sums, expected.sums) and torch.equal(learner.ranks(batch, 9), ranks)


def test_the_losses_are_those_of_the_definition():
    model = fresh_model()
    batch, learner = batch_of(model), learner_for(model, head_weight=0.25)
    steps(learner, batch, 3, progress=1.0)
    losses = learner(batch)
    with torch.no_grad():
        hidden = learner._adapted.target.states(batch.input_ids)
        told = model.lm_head(hidden).log_softmax(-1)
        taught = model.lm_head(batch.hidden).log_softmax(-1)
        drafts = model.lm_head(learner.heads(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])).log_softmax(-1)

    def divergence(p, q):
        return float((p.exp() * (p - q)).sum())

    supervised = (batch.runs >= 0).nonzero().tolist()
    language = sum(divergence(taught[row, p], told[row, p]) for row, p in supervised)
    assert losses.extra.item() == pytest.approx(language / 0.25, rel=1e-6) and language > 0
    for depth in range(3):
        pairs = [
            (row, p)
            for row, p in supervised
            if p + 1 + depth < batch.runs.shape[1] and batch.runs[row, p + 1 + depth] == batch.runs[row, p]
        ]
        expected = sum(divergence(taught[row, p + 1 + depth], drafts[depth, row, p]) for row, p in pairs)
        assert losses.sums[depth].item() == pytest.approx(expected, rel=1e-6)
        assert int(losses.counts[depth]) == len(pairs)


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_every_head_learns_its_own_offset(labels):
    model = counting_model()
    ids = (torch.arange(40)[None] + torch.tensor([[0], [7]])) % 16
    batch = batch_of(model, ids, runs=((0, 0, 38), (1, 0, 38)))
    assert torch.equal(model(ids).logits[:, 2:-1].argmax(-1), ids[:, 3:]), "the target counts"
    learner = learner_for(model, labels, torch.arange(16), warmup=0.5)
    assert not bool((learner.ranks(batch, 4)[:, :, 2:34] == 0).all())
    steps(learner, batch, 60, progress=0.0, lr=1e-2)
    steps(learner, batch, 60, progress=0.6, lr=1e-2)
    learner.eval()
    ranks = learner.ranks(batch, 4)
    for depth in range(3):
        right = ranks[depth, :, 2 : 37 - depth] == 0
        assert float(right.double().mean()) > 0.95
    drafted = model.lm_head(learner.heads(learner._hidden(batch).flatten(0, 1))).argmax(-1).unflatten(1, ids.shape)
    for depth in range(3):
        assert float((drafted[depth, :, 2:34] == (ids[:, 2:34] + 2 + depth) % 16).double().mean()) > 0.95
    with torch.no_grad():
        said = model.lm_head(learner._adapted.target.states(ids)).argmax(-1)
    assert torch.equal(said[:, 2:-1], ids[:, 3:]), "the adapted target still counts"


def test_joint_training_does_better_than_heads_on_a_frozen_target():
    model = fresh_model(dtype=torch.float32)
    batch = batch_of(model)
    frozen, joint = learner_for(model), learner_for(model)
    one = steps(frozen, batch, 40, progress=0.0)[-1]
    other = steps(joint, batch, 40, progress=1.0)[-1]
    assert sum(other) < 0.8 * sum(one)


def test_the_language_of_the_adapted_target_is_held_to_the_original():
    """Without its loss, which a large λ0 comes to, the adapted target drifts further."""
    model = fresh_model(dtype=torch.float32)
    batch, drifts = batch_of(model), []
    for weight in (0.05, 100.0):
        learner = learner_for(model, head_weight=weight)
        steps(learner, batch, 40, progress=1.0)
        drifts.append(float(learner.eval()(batch).extra.detach()) * weight)
    assert 0 < drifts[0] < 0.5 * drifts[1]


def test_dropout_is_for_training_the_adapter_only():
    model = fresh_model("gpt2", dtype=torch.float32)  # it has dropout of its own
    batch, learner = batch_of(model), learner_for(model, dropout=0.5)
    learner.at(1.0)
    assert torch.equal(learner(batch).sums, learner(batch).sums), "of an adapter that is zero nothing can be dropped"
    steps(learner, batch, 2, progress=1.0)
    assert not torch.equal(learner(batch).sums, learner(batch).sums)
    learner.eval()
    assert torch.equal(learner(batch).sums, learner(batch).sums)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("trainable", [False, True])
def test_the_users_model_is_not_changed(name, trainable, tmp_path):
    model = fresh_model(name, tie_word_embeddings=True).requires_grad_(trainable)
    batch, ids = batch_of(model), prompts(2, 10)

    def seen():
        with torch.no_grad():
            logits = model(ids).logits
        return {
            "modules": [(path, id(part)) for path, part in model.named_modules()],
            "parameters": [(path, id(part), part.requires_grad) for path, part in model.named_parameters()],
            "keys": list(model.state_dict()),
            "attributes": {path: sorted(vars(part)) for path, part in model.named_modules()},
            "class": type(model),
            "config": model.config.to_dict(),
            "hooks": hooks(model),
            "training": [part.training for part in model.modules()],
            "logits": logits.tolist(),
            "grads": [part.grad for part in model.parameters()],
        }

    before, weights = seen(), copy.deepcopy(model.state_dict())
    learner = learner_for(model)
    steps(learner, batch, 1, progress=0.0)
    steps(learner, batch, 2, progress=1.0)
    learner.save(tmp_path / "heads", {})
    assert seen() == before
    assert changed(weights, model) == set()


def test_the_weights_are_shared_with_the_users_model():
    model = fresh_model(tie_word_embeddings=True)
    learner = learner_for(model)
    known = {parameter.data_ptr() for parameter in model.parameters()}
    added = {id(parameter) for parameter in learner.adapter}
    twin = learner._adapted.target.model
    assert all((p.data_ptr() in known) == (id(p) not in added) for p in twin.parameters())
    assert twin.get_input_embeddings().weight is twin.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3"])
@pytest.mark.parametrize("draft_ids", [EVERY, FEW])
def test_it_is_loaded_into_the_merged_target_and_drafts_losslessly(name, draft_ids, tmp_path):
    model = fresh_model(name)
    batch, learner = batch_of(model), learner_for(model, draft_ids=draft_ids)
    steps(learner, batch, 5, progress=1.0, lr=1e-2)
    learner.save(tmp_path / "heads", {"steps": 5})
    described = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert described["method"] == "medusa" and described["training"]["steps"] == 5
    assert "lossless with respect to that model" in described["training"]["adapted_target"]

    user = fresh_model(name)
    merged = peft.PeftModel.from_pretrained(user, tmp_path / "heads" / ADAPTER_FOLDER).merge_and_unload()
    assert type(merged) is type(model)
    torch.testing.assert_close(Target(merged).features(batch.input_ids), learner.eval()._hidden(batch).detach())
    drafter = treedec.load_drafter(tmp_path / "heads", merged)
    assert isinstance(drafter, MedusaDrafter)
    ids = prompts(2, 12)
    for arguments in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        expected = reference(merged, ids, max_new_tokens=24, **arguments).ids
        torch.manual_seed(7)
        assert torch.equal(treedec.generate(merged, ids, drafter, max_new_tokens=24, **arguments), expected)
    greedy = reference(merged, ids, max_new_tokens=24, do_sample=False).ids
    assert not torch.equal(reference(model, ids, max_new_tokens=24, do_sample=False).ids, greedy), "it was adapted"


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    model = fresh_model()
    learner, folder = learner_for(model), tmp_path / "heads"
    learner.save(folder, {"run": 1})
    (folder / "README.md").write_text("mine")
    (folder / ADAPTER_FOLDER / "stale").write_text("of the run before")

    def files():
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = files()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        learner.save(folder, {"run": 2})
    steps(learner, batch_of(model), 2, progress=1.0)
    kept = learner._adapted.model.save_pretrained
    learner._adapted.model.save_pretrained = lambda *_, **__: (_ for _ in ()).throw(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        learner.save(folder, {"run": 2}, overwrite=True)
    assert files() == before
    learner._adapted.model.save_pretrained = kept
    learner.save(folder, {"run": 2}, overwrite=True)
    after = files()
    assert set(after) == set(before) - {f"{ADAPTER_FOLDER}/stale"} and after["README.md"] == b"mine"
    weights = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
    assert after[weights] != before[weights] and after["model.safetensors"] != before["model.safetensors"]
    with torch.no_grad():
        learner.adapter[0].fill_(float("nan"))
    with pytest.raises(ValueError, match="adapter holds values that are not finite"):
        learner.save(folder, {"run": 3}, overwrite=True)
    assert files() == after and [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_some_layers_can_be_named():
    learner = learner_for(tiny_model(), target_modules=("q_proj", "v_proj"))
    assert len(learner.adapter) == 2 * 2 * 2
    with pytest.raises(ValueError, match=r"peft cannot adapt LlamaForCausalLM like that .*other target_modules"):
        learner_for(tiny_model(), target_modules=("no_such_layer",))
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(ValueError, match="must not name the LM head or the embeddings"):
            learner_for(tiny_model(), target_modules=("q_proj", name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be positive"),
        ({"alpha": 0}, "alpha must be positive"),
        ({"head_weight": 0.0}, "head_weight must be positive"),
        ({"dropout": 1.0}, r"dropout must be a fraction in \[0, 1\)"),
        ({"warmup": -0.1}, r"warmup must be a fraction in \[0, 1\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Medusa2Options(**options)


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install treedec\[train\]"):
        learner_for(tiny_model())


def test_both_stages_run_under_ddp(tmp_path):
    model = fresh_model()
    batch, learner = batch_of(model), learner_for(model, warmup=0.5)
    alone = copy.deepcopy(learner)
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(learner, find_unused_parameters=True)
        for module, owner in ((wrapped, learner), (alone, alone)):
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            for progress in (0.0, 0.25, 0.5, 0.75):
                owner.at(progress)
                losses = module(batch)
                optimizer.zero_grad(set_to_none=True)
                (losses.sums.sum() + (0 if losses.extra is None else losses.extra)).backward()
                optimizer.step()
                assert all((part.grad is None) == (progress < 0.5) for part in owner.adapter)
    finally:
        destroy_process_group()
    assert changed(state_of(alone), learner) == set()
