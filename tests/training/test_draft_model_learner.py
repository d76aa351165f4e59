"""The draft model: what is kept of the target, what it is trained on, and the folder it leaves."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from kit import VOCAB, fresh_model, prompts, reference, tiny_model
from torch.nn import functional as F

import treedec
from treedec.heads import DraftModelDrafter
from treedec.target import Target
from treedec.training.contracts import Batch
from treedec.training.learners import LEARNERS
from treedec.training.learners.draft_model import TRAINING_FILE, DraftModelLearner, DraftModelOptions, prune, spread

EVERY = torch.arange(VOCAB)
MIXED = {
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    },
    "qwen2": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
}


def batch_of(model, lengths=(14, 9), runs=((0, 2, 12), (1, 0, 4), (1, 5, 8)), seed=1):
    """Padded random text; `runs` are rows, first positions and one past the last."""
    ids = prompts(len(lengths), max(lengths), seed)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    marked = torch.full(ids.shape, -1)
    for number, (row, begin, end) in enumerate(runs):
        marked[row, begin:end] = number
    return Batch(ids * real, torch.tensor(lengths), marked, Target(model).features(ids * real))


def learner_for(target, labels="soft", **options):
    return DraftModelLearner.build(target, DraftModelOptions(**options), EVERY, labels=labels)


def plain_losses(learner, target, batch, labels):
    """The definition, from the logits of two whole models: sums of the loss, hits and count."""
    student = learner.student(batch.input_ids, use_cache=False).logits
    teacher = target(batch.input_ids, use_cache=False).logits
    loss, hits, count = 0, 0, 0
    for row, position in (batch.runs >= 0).nonzero().tolist():
        q, p = student[row, position].log_softmax(-1), teacher[row, position].softmax(-1)
        text = batch.input_ids[row, position + 1]
        loss = loss + (F.kl_div(q, p, reduction="sum") if labels == "soft" else -q[text])
        hits += int(q.argmax() == p.argmax())
        count += 1
    return loss, hits, count


def without(model, kept):
    """The model with the other layers made to add nothing to the residual stream: an oracle for llama-like layers."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for place, layer in enumerate(model.model.layers):
            if place not in kept:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return model


def test_it_is_registered():
    kind = LEARNERS["draft-model"]
    learner = kind.build(tiny_model(), kind.options(), EVERY[:5], labels="soft")
    assert learner.method == "draft-model" and (learner.depths, learner.offset) == (1, 0)
    assert torch.equal(learner.draft_ids, EVERY), "it drafts every token, whatever heads would"


@pytest.mark.parametrize(
    ("layers", "kept", "expected"),
    [(12, 3, (0, 6, 11)), (30, 4, (0, 10, 19, 29)), (32, 2, (0, 31)), (5, 1, (0,)), (3, 3, (0, 1, 2)), (2, 4, (0, 1))],
)
def test_layers_are_spread_from_the_first_to_the_last(layers, kept, expected):
    assert spread(layers, kept) == expected


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "mistral", "phi3", "mixtral"])
def test_a_copy_with_all_layers_is_the_target(name):
    model, ids = tiny_model(name), prompts(2, 20)
    student = prune(model, (0, 1), torch.float64).eval()
    assert type(student) is type(model)
    with torch.no_grad():
        assert torch.equal(student(ids).logits, model(ids).logits)
    shared = {parameter.data_ptr() for parameter in student.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert not shared


@pytest.mark.parametrize("kept", [(0,), (3,), (0, 3), (1, 2), (0, 2, 3)])
@pytest.mark.parametrize("name", ["llama", *MIXED])
def test_a_copy_computes_what_the_target_does_without_the_other_layers(name, kept):
    model, ids = fresh_model(name, **MIXED.get(name, {"num_hidden_layers": 4})), prompts(2, 20)
    student = prune(model, kept, torch.float64).eval()
    assert student.config.num_hidden_layers == len(student.model.layers) == len(kept)
    if name in MIXED:
        assert list(student.config.layer_types) == [MIXED[name]["layer_types"][layer] for layer in kept]
    with torch.no_grad():
        assert torch.equal(student(ids).logits, without(model, kept)(ids).logits)


def test_the_target_is_not_changed():
    model = fresh_model("gemma3_text", **MIXED["gemma3_text"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    flags = [parameter.requires_grad for parameter in model.parameters()]
    learner = learner_for(model, layers=2, train_embeddings=True)
    _descend(learner, batch_of(model), steps=2)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert model.config.to_dict() == config and model.generation_config.to_dict() == generation
    assert [parameter.requires_grad for parameter in model.parameters()] == flags and not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_targets_that_cannot_be_cut_down_are_refused():
    with pytest.raises(ValueError, match=r"layer 1 of DiffLlamaForCausalLM cannot become layer 0: .*lambda_init"):
        prune(tiny_model("diffllama"), (1,), torch.float64)
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM cannot be cut down to the layers \(1,\)"):
        prune(tiny_model("deepseek_v3"), (1,), torch.float64)  # it makes its first layer dense, this one is not
    model = fresh_model()
    model.model.others = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="LlamaForCausalLM has 2 lists of 2 modules"):
        prune(model, (0,), torch.float64)


@pytest.mark.parametrize("kept", [(), (1, 0), (0, 0), (2,), (-1,)])
def test_layers_that_are_not_there_are_refused(kept):
    with pytest.raises(ValueError, match="layers_kept must be some of 0 to 1, ascending"):
        prune(tiny_model(), kept, torch.float64)


def test_options_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1 layer"):
        learner_for(tiny_model(), layers=0)
    with pytest.raises(ValueError, match=r"either layers_kept.* or model"):
        learner_for(tiny_model(), layers_kept=(0,), model=str(tmp_path))
    with pytest.raises(ValueError, match="labels must be one of soft, hard"):
        learner_for(tiny_model(), labels="medium")
    with pytest.raises(FileNotFoundError, match="holds neither trained heads nor a draft model"):
        learner_for(tiny_model(), model=str(tmp_path))


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("train_embeddings", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_losses_equal_the_plain_twin(name, train_embeddings, labels, monkeypatch):
    monkeypatch.setattr("treedec.training.learners.draft_model._BLOCK", 5)
    model = tiny_model(name)
    batch = batch_of(model)
    learner = learner_for(model, labels, layers=1, train_embeddings=train_embeddings).eval()
    losses = learner(batch)
    expected, hits, count = plain_losses(learner, model, batch, labels)
    torch.testing.assert_close(losses.sums, expected[None].detach(), rtol=1e-9, atol=1e-9)
    assert losses.hits.tolist() == [hits] and losses.counts.tolist() == [count] == [17] and losses.extra is None
    losses.sums.sum().backward()
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(expected, trained)
    assert all(parameter.grad is not None for parameter in trained)
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("train_embeddings", [False, True])
def test_a_pack_without_supervision_has_finite_losses(train_embeddings):
    learner = learner_for(tiny_model(), layers=1, train_embeddings=train_embeddings)
    losses = learner(batch_of(tiny_model(), runs=()))
    losses.sums.sum().backward()
    assert losses.sums.tolist() == [0.0] and losses.counts.tolist() == [0]


def test_what_comes_after_a_text_does_not_matter():
    model = tiny_model("mistral")
    learner = learner_for(model, layers=1)
    together = batch_of(model)
    parts = [
        Batch(*(part[row : row + 1, :length] for part in (together.input_ids,)), together.lengths[row : row + 1],
              together.runs[row : row + 1, :length], together.hidden[row : row + 1, :length])
        for row, length in enumerate(together.lengths.tolist())
    ]  # fmt: skip
    torch.testing.assert_close(learner(together).sums, sum(learner(part).sums for part in parts))


@pytest.mark.parametrize("train_embeddings", [False, True])
def test_ranks_are_the_places_of_the_text(train_embeddings):
    model = tiny_model()
    batch, learner = batch_of(model), learner_for(model, layers=1, train_embeddings=train_embeddings).eval()
    ranks = learner.ranks(batch, 7)
    with torch.no_grad():
        logits = learner.student(batch.input_ids).logits
    expected = torch.full(batch.input_ids.shape, 7)
    for row, position in (batch.runs >= 0).nonzero().tolist():
        z = logits[row, position]
        expected[row, position] = min(7, int((z > z[batch.input_ids[row, position + 1]]).sum()))
    assert ranks.shape == (1, *batch.input_ids.shape) and torch.equal(ranks[0], expected)
    assert not ranks.requires_grad and bool((ranks < 7).any())


def _descend(learner, batch, steps, lr=3e-3):
    """KL per position before each step."""
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=lr)
    seen = []
    for _ in range(steps):
        losses = learner(batch)
        loss = losses.sums.sum() / losses.counts.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_it_learns_to_say_what_the_target_says(train_embeddings, tied):
    model = fresh_model("llama", torch.float32, num_hidden_layers=3, tie_word_embeddings=tied)
    learner = learner_for(model, layers=1, train_embeddings=train_embeddings)
    assert learner.student.model.embed_tokens.weight.dtype == torch.float32
    before = copy.deepcopy(learner.student.state_dict())
    seen = _descend(learner, batch_of(model), steps=60)
    assert seen[-1] < 0.3 * seen[0]
    after = learner.student.state_dict()
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == (set() if train_embeddings else {"model.embed_tokens.weight", "lm_head.weight"})
    assert torch.equal(after["model.embed_tokens.weight"], after["lm_head.weight"]) == tied


def test_masters_are_float32_and_the_folder_has_the_dtype_of_the_target(tmp_path):
    model = fresh_model("llama", torch.bfloat16)
    learner = learner_for(model, layers=1)
    assert {parameter.dtype for parameter in learner.parameters()} == {torch.float32}
    learner.save(tmp_path / "draft", {})
    drafter = treedec.load_drafter(tmp_path / "draft", model)
    state = drafter._target.model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_what_is_saved_drafts_losslessly(name, tmp_path):
    model = fresh_model(name, **MIXED.get(name, {"num_hidden_layers": 3}))
    model.generation_config.max_new_tokens = 24
    learner = learner_for(model, layers_kept=(0, 2))
    _descend(learner, batch_of(model), steps=3)
    learner.save(tmp_path / "draft", {"note": "brief"})
    drafter = treedec.load_drafter(tmp_path / "draft", model)
    assert isinstance(drafter, DraftModelDrafter)
    loaded, ids = drafter._target.model, prompts(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, learner.student.eval()(ids).logits)
    assert loaded.generation_config.max_new_tokens == 24
    out = treedec.generate(model, ids, drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(out, reference(model, ids, do_sample=False).ids)
    described = json.loads((tmp_path / "draft" / TRAINING_FILE).read_text())
    assert (
        described["training"] == {"note": "brief"} and described["target"]["layers"] == model.config.num_hidden_layers
    )


def test_only_a_draft_model_of_ours_is_replaced(tmp_path):
    learner, folder = learner_for(tiny_model(), layers=1), tmp_path / "draft"
    learner.save(folder, {"run": 1})
    (folder / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        learner.save(folder, {"run": 2})
    assert json.loads((folder / TRAINING_FILE).read_text())["training"] == {"run": 1}
    learner.save(folder, {"run": 2}, overwrite=True)
    assert json.loads((folder / TRAINING_FILE).read_text())["training"] == {"run": 2}
    assert (folder / "README.md").read_text() == "mine"
    other = tmp_path / "model"
    tiny_model().save_pretrained(other)
    before = sorted(path.name for path in other.iterdir())
    with pytest.raises(FileExistsError, match="no draft model of treedec's training"):
        learner.save(other, {}, overwrite=True)
    assert sorted(path.name for path in other.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "model"], "nothing is left over"


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    learner, folder = learner_for(fresh_model(dtype=torch.float16), layers=1), tmp_path / "draft"
    learner.save(folder, {})
    with torch.no_grad():
        learner.student.model.norm.weight[0] = 1e6
    with pytest.raises(ValueError, match=r"'model.norm.weight' holds values that are not finite in torch.float16"):
        learner.save(folder, {}, overwrite=True)
    treedec.load_drafter(folder, fresh_model(dtype=torch.float16))
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_an_existing_model_goes_on_from_where_it_is(tmp_path):
    model = tiny_model("llama", torch.float32)
    small = fresh_model("gpt2", torch.float32, seed=5, n_embd=16, n_layer=1)
    small.save_pretrained(tmp_path / "small")
    learner = learner_for(model, model=str(tmp_path / "small")).eval()
    batch, ids = batch_of(model), prompts(2, 9)
    with torch.no_grad():
        assert torch.equal(learner.student(ids).logits, small(ids).logits)
    expected, hits, count = plain_losses(learner, model, batch, "soft")
    losses = learner(batch)
    torch.testing.assert_close(losses.sums, expected[None], rtol=1e-4, atol=1e-4)
    assert (losses.hits.tolist(), losses.counts.tolist()) == ([hits], [count])
    seen = _descend(learner, batch, steps=60)
    assert seen[-1] < 0.7 * seen[0]
    assert torch.equal(learner.student.lm_head.weight, small.lm_head.weight)
    learner.save(tmp_path / "draft", {})
    out = treedec.generate(model, ids, treedec.load_drafter(tmp_path / "draft", model), max_new_tokens=9)
    assert torch.equal(out, reference(model, ids, max_new_tokens=9).ids)


def test_another_vocabulary_is_refused(tmp_path):
    fresh_model("llama", torch.float32, vocab_size=VOCAB + 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"LM head has {VOCAB + 1} rows and the target's {VOCAB}"):
        learner_for(tiny_model("llama", torch.float32), model=str(tmp_path))
