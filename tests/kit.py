"""What tests share: tiny random models, ways to decode, and the reference that `model.generate` gives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from drafters import Scripted, drafters
from tokenizers import Tokenizer, models
from tokenizers import decoders as text_decoders
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

from treedec import Drafter, Target
from treedec.acceptance import AcceptanceRule, Greedy
from treedec.decode import Decoder, Request

VOCAB = 97
WINDOW = 8

# With tied embeddings a model this small repeats its last token for ever.
_COMMON = {
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_NO_GROUPS = {key: value for key, value in _ROPE.items() if key != "num_key_value_heads"}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MIXED = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SHARING = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
_ENCODER = _NO_GROUPS | {"is_decoder": True, "pad_token_id": 0}
# Configuration class, its own arguments, and the attention backend that the architecture needs.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", _ROPE, "sdpa"),
    "qwen3": ("Qwen3Config", _ROPE | {"head_dim": 8}, "sdpa"),
    "mistral": ("MistralConfig", _ROPE | {"sliding_window": WINDOW}, "sdpa"),
    "gemma2": (
        "Gemma2Config",
        _ROPE
        | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
        "eager",
    ),
    "gpt2": ("GPT2Config", _GPT, "sdpa"),
    "gpt_neox": ("GPTNeoXConfig", _NO_GROUPS, "sdpa"),
    "phi3": ("Phi3Config", _ROPE, "sdpa"),
    # The rest is for tests/engine/test_architectures.py.
    "apertus": ("ApertusConfig", _ROPE, "sdpa"),
    "arcee": ("ArceeConfig", _ROPE, "sdpa"),
    "bert": ("BertConfig", _ENCODER, "sdpa"),
    "biogpt": ("BioGptConfig", _NO_GROUPS, "sdpa"),
    "codegen": ("CodeGenConfig", _GPT | {"rotary_dim": 8}, "eager"),
    "cohere": ("CohereConfig", _ROPE, "sdpa"),
    "cohere2": ("Cohere2Config", _ROPE | _MIXED, "sdpa"),
    "deepseek_v2": ("DeepseekV2Config", _ROPE | _ROUTED_EXPERTS | _LATENT, "sdpa"),
    "deepseek_v3": ("DeepseekV3Config", _ROPE | _ROUTED_EXPERTS | _LATENT, "sdpa"),
    "diffllama": ("DiffLlamaConfig", _ROPE, "sdpa"),
    "dory": (  # runs its middle layers three times
        "DoryConfig",
        _ROPE
        | _MIXED
        | {"num_hidden_layers": 4, "layer_types": _MIXED["layer_types"] * 2}
        | {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 3},
        "sdpa",
    ),
    "ernie4_5": ("Ernie4_5Config", _ROPE | {"head_dim": 8}, "sdpa"),
    "exaone4": ("Exaone4Config", _ROPE | _MIXED, "sdpa"),
    "falcon": ("FalconConfig", _NO_GROUPS | {"alibi": False}, "sdpa"),
    "gemma": ("GemmaConfig", _ROPE | {"head_dim": 8}, "sdpa"),
    "gemma3_text": ("Gemma3TextConfig", _ROPE | _MIXED, "sdpa"),
    "gemma3n_text": (  # its last two layers read the keys and values of earlier ones
        "Gemma3nTextConfig",
        _ROPE | _MIXED | _SHARING | {"altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6},
        "sdpa",
    ),
    "gemma4_text": ("Gemma4TextConfig", _ROPE | _MIXED | _SHARING | {"global_head_dim": 8}, "sdpa"),
    "glm4": ("Glm4Config", _ROPE | {"head_dim": 8}, "sdpa"),
    "glm4_moe": ("Glm4MoeConfig", _ROPE | _ROUTED_EXPERTS | {"head_dim": 8}, "sdpa"),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT, "sdpa"),
    "gpt_oss": ("GptOssConfig", _ROPE | _LOCAL_EXPERTS | _MIXED, "eager"),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 8}, "eager"),
    "granite": ("GraniteConfig", _ROPE | {"logits_scaling": 4.0}, "sdpa"),
    "granitemoe": ("GraniteMoeConfig", _ROPE | _LOCAL_EXPERTS, "sdpa"),
    "helium": ("HeliumConfig", _ROPE | {"head_dim": 8}, "sdpa"),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _ROPE | {"head_dim": 8}, "sdpa"),
    "longcat_flash": (  # two attentions in every layer
        "LongcatFlashConfig",
        {key: value for key, value in _ROPE.items() if key not in ("intermediate_size", "num_hidden_layers")}
        | _LATENT
        | {"num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "head_dim": 8}
        | {"n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2},
        "sdpa",
    ),
    "mixtral": ("MixtralConfig", _ROPE | _LOCAL_EXPERTS | {"sliding_window": WINDOW}, "sdpa"),
    "modernbert-decoder": (
        "ModernBertDecoderConfig",
        _NO_GROUPS
        | {"local_attention": 2 * WINDOW, "layer_types": _MIXED["layer_types"]}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        "sdpa",
    ),
    "nemotron": ("NemotronConfig", _ROPE | {"head_dim": 8}, "sdpa"),
    "olmo": ("OlmoConfig", _ROPE, "sdpa"),
    "olmo2": ("Olmo2Config", _ROPE, "sdpa"),
    "olmo3": ("Olmo3Config", _ROPE | {k: v for k, v in _MIXED.items() if k != "head_dim"}, "sdpa"),
    "olmoe": ("OlmoeConfig", _ROPE | {"num_experts": 4, "num_experts_per_tok": 2}, "sdpa"),
    "opt": ("OPTConfig", _NO_GROUPS | {"ffn_dim": 64, "word_embed_proj_dim": 32}, "sdpa"),
    "persimmon": ("PersimmonConfig", _NO_GROUPS, "sdpa"),
    "phi": ("PhiConfig", _ROPE, "sdpa"),
    "phimoe": ("PhimoeConfig", _ROPE | _LOCAL_EXPERTS | {"sliding_window": WINDOW}, "sdpa"),
    "qwen2": ("Qwen2Config", _ROPE, "sdpa"),
    "qwen2_moe": ("Qwen2MoeConfig", _ROPE | _EXPERTS | {"shared_expert_intermediate_size": 16}, "sdpa"),
    "qwen3_moe": ("Qwen3MoeConfig", _ROPE | _EXPERTS | {"head_dim": 8}, "sdpa"),
    "roberta": ("RobertaConfig", _ENCODER, "sdpa"),
    "seed_oss": ("SeedOssConfig", _ROPE | {"head_dim": 8}, "sdpa"),
    "smollm3": ("SmolLM3Config", _ROPE, "sdpa"),
    "stablelm": ("StableLmConfig", _ROPE, "sdpa"),
    "starcoder2": ("Starcoder2Config", _ROPE | {"sliding_window": WINDOW}, "sdpa"),
    "vaultgemma": ("VaultGemmaConfig", _ROPE | _MIXED, "eager"),
    "xglm": ("XGLMConfig", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}, "eager"),
}
#: Those that most tests run on.
ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_neox", "phi3")
#: All that the installed transformers has.
ALL_ARCHITECTURES = tuple(name for name, (kind, _, _) in _ARCHITECTURES.items() if hasattr(transformers, kind))

#: Ways to decode: arguments of `generate`. `top_k=0` switches off the default top-50.
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "T=1.0": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "T=1.3": {"do_sample": True, "temperature": 1.3, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.8},
}
DRAFTERS = ("oracle", "adversary", "right-then-wrong", "last-branch", "last-branch-then-wrong")


def fresh_model(
    name: str = "llama", dtype: torch.dtype = torch.float64, attention: str | None = None, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A tiny random model of its own, for tests that alter it. `config` overrides configuration arguments."""
    kind, arguments, backend = _ARCHITECTURES[name]
    configuration = getattr(transformers, kind)(**(_COMMON | arguments | config))
    configuration._attn_implementation = attention or backend
    configuration._experts_implementation = "eager"  # the grouped product does not exist in float64
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (
            transformers.AutoModelForCausalLM.from_config(configuration, dtype=torch.float64)
            .eval()
            .requires_grad_(False)
        )
        for parameter in model.parameters():
            # The usual 0.02 leaves 32 dimensions with all but constant scores. Vectors are norms and biases.
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.to(dtype)


#: The same model for everybody who asks for it: do not alter it.
tiny_model = cache(fresh_model)


def prompts(batch: int = 1, length: int = 12, seed: int = 1) -> Tensor:
    """`[batch, length]` random ids; by default longer than the sliding window."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def ragged_prompts(lengths: tuple[int, ...] = (12, 5, 9)) -> tuple[Tensor, Tensor]:
    """Left-padded ids `[B, L]` and their attention mask."""
    ids, widest = prompts(len(lengths), max(lengths)), max(lengths)
    mask = torch.tensor([[0] * (widest - length) + [1] * length for length in lengths])
    return ids * mask, mask


def hooks(model: PreTrainedModel) -> list[Any]:
    """Everything hooked to any module of the model."""
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]


@dataclass(frozen=True)
class Reference:
    """What `model.generate` returned, and the state in which it left the default generator."""

    ids: Tensor
    prompt_length: int
    rng_state: Tensor

    @property
    def new(self) -> list[list[int]]:
        return self.ids[:, self.prompt_length :].tolist()


def reference(model: PreTrainedModel, ids: Tensor, seed: int = 7, **arguments: Any) -> Reference:
    torch.manual_seed(seed)
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, **arguments)
    return Reference(out, ids.shape[1], torch.get_rng_state())


def scripted(expected: Reference, name: str, attention_mask: Tensor | None = None) -> Drafter:
    """One of the standard scripted drafters, knowing the continuation that the reference found."""
    lengths = [expected.prompt_length] * len(expected.ids) if attention_mask is None else attention_mask.sum(1).tolist()
    return drafters(expected.new, lengths, VOCAB)[name]


def uneven(expected: Reference, attention_mask: Tensor | None = None) -> Drafter:
    """A tree drafter that is right for longer in some rows than in others, so that acceptance is ragged."""
    lengths = [expected.prompt_length] * len(expected.ids) if attention_mask is None else attention_mask.sum(1).tolist()
    knows = [
        [(token + 7) % VOCAB if place % (row + 2) == row else token for place, token in enumerate(tokens)]
        for row, tokens in enumerate(expected.new)
    ]
    return Scripted(knows, lengths, VOCAB, decoys=2)


def decoder(
    model: PreTrainedModel,
    ids: Tensor,
    drafter: Drafter,
    max_new_tokens: int,
    rule: AcceptanceRule | None = None,
    attention_mask: Tensor | None = None,
) -> Decoder:
    """A `Decoder` to be stepped by hand, greedy unless told otherwise."""
    limit = ids.shape[1] + max_new_tokens
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    nothing = LogitsProcessorList()
    request = Request(ids, mask, limit, [nothing] * len(ids), nothing, StoppingCriteriaList([MaxLengthCriteria(limit)]))
    return Decoder(Target(model), drafter, rule or Greedy(), request)


def costing(model, costs):
    """A target whose passes are said to cost that."""
    target = Target(model)
    target.costs = costs
    return target


def fresh_prefill(model, tokens):
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), use_cache=True)
    cache = out["cache"] if "cache" in out else out["past_key_values"]  # transformers 5.24 renamed it
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def check_visible_states(model, decoding):
    """Every committed token but the last, which is the next root, is cached; nothing else is visible.

    Of rows that had finished before the last round nothing is.
    """
    assert decoding.cache.visible.shape[0] == len(decoding.held)
    for place, row in enumerate(decoding.held):
        text = decoding.rows.texts[row]
        assert decoding.places[row] == place
        assert decoding.cache.lengths[place] == len(text) - 1 == int(decoding.cache.visible[place].sum())
        for layer, (k, v) in enumerate(fresh_prefill(model, text[:-1])):
            ours_k, ours_v = decoding.cache.visible_states(layer, place)
            torch.testing.assert_close(ours_k, k, atol=1e-11, rtol=0)
            torch.testing.assert_close(ours_v, v, atol=1e-11, rtol=0)


def characters():
    """A tokenizer of one printable ASCII character per id."""
    vocabulary = {chr(33 + i): i for i in range(VOCAB - 3)} | {f"<{i}>": VOCAB - 3 + i for i in range(3)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.decoder = text_decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def syllables():
    """A tokenizer of one, two or three letters per id, so that stop strings begin and end within tokens."""
    texts = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("abcdefgh", repeat=size)]
    vocabulary = {text: i for i, text in enumerate(texts[:VOCAB])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.decoder = text_decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Untouched(LogitsProcessor):
    """A processor of the user, which treedec knows nothing about."""

    def __call__(self, input_ids, scores):
        return scores


class Explodes(LogitsProcessor):
    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("boom")
        return scores


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ends = [], 0

    def put(self, value):
        self.given.append(value)

    def end(self):
        self.ends += 1
