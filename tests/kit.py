"""What tests share: tiny random models, ways to decode, and the reference that `model.generate` gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from drafters import Scripted, drafters
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

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
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, "sdpa"),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _ROPE.items() if k != "num_key_value_heads"}, "sdpa"),
    "phi3": ("Phi3Config", _ROPE, "sdpa"),
}
ARCHITECTURES = tuple(_ARCHITECTURES)

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
