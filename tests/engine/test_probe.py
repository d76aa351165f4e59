"""The probe tells right trees from wrong ones, in every dtype, and leaves nothing behind; `treedec check` shows it."""

import gc
import json
import warnings

import pytest
import torch
import transformers
from kit import ARCHITECTURES, VOCAB, WINDOW, fresh_model, hooks, tiny_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from treedec import Target, UnsupportedModel, cli, limits, probe
from treedec.probe import check_model, ensure_exact

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def initialised(architecture, dtype, std):
    model = fresh_model(architecture)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(std / 0.3)
    return model.to(dtype)


def gpt_neo(dtype=torch.float64):
    configuration = transformers.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=WINDOW, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(configuration).to(dtype).eval()


@pytest.fixture
def without_limits(monkeypatch):
    """As if nothing were known of any model."""
    monkeypatch.setattr(limits, "KNOWN_LIMITS", {})
    monkeypatch.setattr(limits, "_UNFIT_CONFIGURATIONS", {})


@pytest.fixture
def passes(monkeypatch):
    """Counts probes."""
    counted = []
    real = probe.check_model
    monkeypatch.setattr(probe, "check_model", lambda *args, **kwargs: counted.append(1) or real(*args, **kwargs))
    return counted


@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_models_pass_and_a_wrong_mask_would_not(architecture, dtype, std):
    check = check_model(initialised(architecture, dtype, std))
    assert check.exact and check.conclusive and check.reason is None
    assert check.error <= check.tolerance < check.control
    assert check.noise <= check.tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_alone_finds_attention_by_slot(without_limits, dtype):
    check = check_model(gpt_neo(dtype))
    assert not check.exact and check.error > check.tolerance > check.noise
    assert "GPTNeoForCausalLM scores a token tree unlike its branches" in check.reason


def test_the_probe_alone_finds_alibi(without_limits):
    configuration = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )
    model = AutoModelForCausalLM.from_config(configuration).eval()
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM runs, but not over a token tree"):
        check_model(model)


def test_what_the_probe_finds_is_refused_every_time(without_limits):
    model = gpt_neo()
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="unlike its branches"):
            ensure_exact(model)


def test_a_target_that_misplaces_its_nodes_is_found(monkeypatch):
    """Control: the probe would also find a fault of our own."""
    model, score = tiny_model(), Target.score

    def shifted(self, cache, tokens, positions, sees, keep, features=None):
        return score(self, cache, tokens, positions + (sees.shape[-1] == probe._NODES), sees, keep, features)

    monkeypatch.setattr(Target, "score", shifted)
    assert not check_model(model).exact


def test_a_model_that_ignores_its_context_is_inconclusive():
    model = fresh_model(dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    check = check_model(model)
    assert check.exact and not check.conclusive and check.control < check.tolerance
    with pytest.warns(UserWarning, match="cannot check its token trees"):
        ensure_exact(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensure_exact(model)  # once is enough


def test_logits_that_are_not_finite_prove_nothing():
    model = fresh_model()
    model.lm_head.weight.fill_(torch.inf)
    check = check_model(model)
    assert check.exact and not check.conclusive and "not finite" in check.reason


@pytest.mark.parametrize(("window", "short", "long"), [(8, 16, 16), (40, 48, 48), (128, 136, 136), (200, 16, 208)])
def test_prompts_fill_the_window_where_that_is_cheap_or_asked_for(window, short, long):
    model = fresh_model("mistral", sliding_window=window)
    assert check_model(model).prompt_length == short
    assert check_model(model, thorough=True).prompt_length == long


def test_prompts_keep_within_the_context_and_below_the_rope_switch():
    assert check_model(fresh_model("gpt2", n_positions=20)).prompt_length == 12
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert check_model(fresh_model(rope_parameters=rope, max_position_embeddings=18)).prompt_length == 10
    with pytest.raises(UnsupportedModel, match="context of fewer than 9 tokens"):
        check_model(fresh_model("gpt2", n_positions=8))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a17_nothing_is_left_behind(architecture):
    model = fresh_model(architecture)
    state, config = torch.get_rng_state(), model.config.to_dict()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    ensure_exact(model)
    check_model(model, thorough=True)
    assert hooks(model) == [] and not model.training
    assert torch.equal(torch.get_rng_state(), state) and model.config.to_dict() == config
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_a_model_is_probed_once_and_again_when_it_changes(passes):
    model = fresh_model()
    for _ in range(3):
        ensure_exact(model)
        ensure_exact(Target(model))
    assert len(passes) == 1
    model.set_attn_implementation("eager")
    ensure_exact(model)
    ensure_exact(model)
    assert len(passes) == 2
    model.to(torch.float32)
    ensure_exact(model)
    assert len(passes) == 3
    ensure_exact(fresh_model())
    assert len(passes) == 4


def test_what_is_remembered_goes_with_the_model():
    gc.collect()
    before = len(probe._CHECKS)
    model = fresh_model()
    ensure_exact(model)
    assert len(probe._CHECKS) == before + 1
    del model
    gc.collect()
    assert len(probe._CHECKS) == before


def test_training_mode_is_fine_without_dropout_only():
    model = fresh_model().train()
    ensure_exact(model)
    assert model.training
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedModel, match=r"dropout makes it random: call model.eval\(\)"):
        ensure_exact(fresh_model("gpt2").train())
    assert torch.equal(torch.get_rng_state(), state)


class Forgetful(transformers.LlamaForCausalLM):
    """Ignores its cache, as models in training mode with gradient checkpointing do in older versions."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, **arguments):
        return super().forward(input_ids, attention_mask, position_ids, **arguments | {"use_cache": False})


def test_a_model_that_fills_no_cache_is_refused():
    model = fresh_model()
    model.__class__ = Forgetful
    with pytest.raises(UnsupportedModel, match=r"does not fill its cache; .* call model.eval\(\)"):
        check_model(model)


def saved(model, path):
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    model.save_pretrained(path)
    return str(path)


def test_check_reports_a_model_that_can_be_decoded(tmp_path, capfd):
    folder = saved(fresh_model("mistral", torch.float32), tmp_path)
    capfd.readouterr()  # the bar of saving
    assert cli.main(["check", folder]) == 0
    out, err = capfd.readouterr()
    for said in ("MistralForCausalLM", "float32 on cpu, sdpa", f"{WINDOW} tokens", "no limit, made for 256", "exact"):
        assert said in out
    assert err == ""
    assert cli.main(["check", folder, "--dtype", "float64", "--json"]) == 0
    out, _ = capfd.readouterr()
    facts = json.loads(out)
    assert out.count("\n") == 1 and facts["dtype"] == "float64" and facts["window"] == WINDOW
    assert facts["supported"] and facts["exact"] and facts["conclusive"] and facts["reason"] is None
    assert facts["error"] < facts["tolerance"] < facts["control"]
    assert facts["max_positions"] is None and facts["context_length"] == 256 and facts["rope_switch"] is None


@pytest.mark.parametrize("known", [True, False])
def test_check_refuses_with_a_reason_and_an_exit_code(tmp_path, capfd, request, known):
    if not known:
        request.getfixturevalue("without_limits")
    reason = "masks attention by slot" if known else "unlike its branches"
    folder = saved(gpt_neo(torch.float32), tmp_path)
    capfd.readouterr()
    assert cli.main(["check", folder]) == 1
    out, err = capfd.readouterr()
    assert "refused: GPTNeoForCausalLM" in out and err == ""
    assert cli.main(["check", folder, "--json"]) == 1
    facts = json.loads(capfd.readouterr()[0])
    assert not facts["supported"] and reason in facts["reason"] and ("error" in facts) == (not known)


def test_check_of_a_model_that_is_not_there_is_a_mistake(capfd):
    assert cli.main(["check", "/no/such/model"]) == 2
    assert "cannot load the target '/no/such/model'" in capfd.readouterr()[1]
