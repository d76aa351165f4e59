"""What is compared: ways of decoding by name, made comparable.

Every method becomes a function from a batch of prompts to a `Decoded`, timed by the same clock in the same places: at
the call, when the first token of every prompt is known, and when the ids of all of them are on the host.

transformers' assisted decoding verifies drafts already in its pass over the prompt, and its draft model reads the
prompt before that. treedec's first pass yields one token, and its draft model reads the prompt when it first drafts.
So a part of what is prefill there is decoding here; sums over both are what to compare. After that pass, the same
drafts are accepted alike.

Peers are other packages, which take their times themselves: see `treedec.benchmarks.peers`.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

import treedec
from treedec.acceptance import acceptance_rule
from treedec.benchmarks.clock import Meter, MeteredDrafter, MeteredTarget, PassWatch, accepted_places
from treedec.benchmarks.peers.names import PEERS, PEERS_FOLDER, PREFIX
from treedec.benchmarks.peers.pool import Peers
from treedec.benchmarks.prompts import Prompt
from treedec.benchmarks.results import Condition
from treedec.costs import Clock
from treedec.drafter import Drafter
from treedec.heads import DraftModelDrafter, shipped_folder
from treedec.models import DEMO, encode_chat
from treedec.stats import DecodingStats
from treedec.target import Target

REFERENCE = "hf"  # what the other methods' tokens are compared with
DRAFT_TOKENS = 4
_LOOKUP_TOKENS = 10  # what transformers drafts by prompt look-up unless told otherwise


class Kind(Enum):
    """What decodes; the values are the names that methods of a kind go by, where there is one."""

    HF = REFERENCE
    AR = "ar"
    VANILLA = "vanilla"
    HF_ASSISTED = "hf-assisted"
    HF_ASSISTED_DEFAULT = "hf-assisted-default"
    HF_PROMPT_LOOKUP = "hf-prompt-lookup"
    DRAFTER = "drafter"
    PEER = "peer"

    @property
    def ours(self) -> bool:
        return self in (Kind.AR, Kind.VANILLA, Kind.DRAFTER)

    @property
    def needs_draft_model(self) -> bool:
        return self in (Kind.VANILLA, Kind.HF_ASSISTED, Kind.HF_ASSISTED_DEFAULT)

    @property
    def batches(self) -> bool:
        """Whether it decodes several prompts together."""
        return self not in (Kind.HF_ASSISTED, Kind.HF_ASSISTED_DEFAULT, Kind.HF_PROMPT_LOOKUP, Kind.PEER)


_NAMED = {kind.value: kind for kind in Kind if kind not in (Kind.DRAFTER, Kind.PEER)}
# Heads that are shipped with treedec for some targets, and those together with n-grams.
_SHORT = ("medusa", "hydra", "recurrent", "eagle3", "union")
_WITHOUT_FOLDER = ("ngram", "none")
# Before the name of a method of treedec's: passes over trees are compiled, and what drafts: draft model, EAGLE head.
COMPILED = "compiled:"
KNOWN = (*_NAMED, "ngram", *_SHORT, *(PREFIX + name for name in PEERS))


@dataclass(frozen=True)
class Method:
    """A way of decoding.

    Attributes:
        name: what it is called in results: as it was given, without the folders above that of a checkpoint.
        kind: what decodes.
        source: of drafters, what `treedec.load_drafter` takes; of peers, the name without `peer:`.
        nodes: nodes per tree, the root included; None for the method's default.
        compiled: passes over trees are compiled by torch, those of the target, of a draft model and of an EAGLE head.
    """

    name: str
    kind: Kind
    source: str | None = None
    nodes: int | None = None
    compiled: bool = False

    @property
    def takes_draft_model(self) -> bool:
        """Whether a draft model would make a difference."""
        return self.kind.needs_draft_model or (self.kind is Kind.PEER and PEERS[self.source or ""].drafts)


def parse_methods(names: Sequence[str], target: str) -> list[Method]:
    """Methods by name, each once; nothing is loaded.

    Args:
        names: each one of `KNOWN`, or what `treedec.load_drafter` takes; `@NODES` behind it sets the size of its trees,
            and `compiled:` before one of treedec's has the target and a draft model compiled.
        target: what `treedec.load_target` takes: short names mean heads that are shipped for it.

    Raises:
        ValueError: an unknown name, a size that does not apply, no name at all, or two that results could not tell
            apart.
    """
    methods = [_parse(name, target) for name in dict.fromkeys(names)]
    if not methods:
        raise ValueError(f"no methods: give some of {_known()}")
    called = [method.name for method in methods]
    if twice := [name for name in called if called.count(name) > 1]:
        raise ValueError(f"two methods would be called {twice[0]!r} in the results: give their folders other names")
    return methods


def _parse(text: str, target: str) -> Method:
    if text.startswith(COMPILED):
        method = _parse(text.removeprefix(COMPILED), target)
        if not method.kind.ours:
            raise ValueError(f"method {text!r}: only treedec's own methods run on its compiled target")
        return replace(method, name=COMPILED + method.name, compiled=True)
    name, at, size = text.rpartition("@")
    if not at or Path(text).exists():
        name, at, size = text, "", ""
    nodes = int(size) if size.isdecimal() else None
    if at and (nodes is None or nodes < 2):
        raise ValueError(f"method {text!r}: behind the @ belongs a number of nodes, the root included, of at least 2")
    kind = Kind.PEER if name.startswith(PREFIX) else _NAMED.get(name, Kind.DRAFTER)
    if kind in (Kind.HF, Kind.AR, Kind.HF_ASSISTED_DEFAULT, Kind.PEER) and at:
        raise ValueError(f"method {text!r}: {name} has no trees of a size that could be set, so no @NODES")
    if kind is Kind.PEER:
        return Method(text, kind, _peer(name))
    if kind is not Kind.DRAFTER:
        return Method(text, kind, None, nodes)
    if name in _SHORT:
        return Method(text, kind, _short_source(name, target), nodes)
    members = [name] if Path(name).exists() else name.split("+")
    for member in members:
        if member not in _WITHOUT_FOLDER and not _exists(member):
            raise ValueError(f"unknown method {text!r}: known are {_known()}")
    return Method("+".join(map(public_name, members)) + at + size, kind, name, nodes)


def _peer(name: str) -> str:
    peer = name.removeprefix(PREFIX)
    if peer not in PEERS:
        raise ValueError(f"unknown method {name!r}: of peers, known are {', '.join(PREFIX + known for known in PEERS)}")
    return peer


def _known() -> str:
    return (
        f"{', '.join(KNOWN)}, 'demo', 'demo:METHOD', folders of heads or of a draft model, and several of these joined "
        "by '+'; @NODES behind a name sets the size of its trees, 'compiled:' before it compiles the target"
    )


def _short_source(name: str, target: str) -> str:
    if target != DEMO:
        raise ValueError(
            f"method {name!r}: there are no shipped heads for the target {target!r}, only for {DEMO!r}: give the "
            "folder of yours"
        )
    source = f"{DEMO}+ngram" if name == "union" else f"{DEMO}:{name}"
    for member in source.split("+"):
        if member not in _WITHOUT_FOLDER and not _exists(member):
            raise ValueError(f"method {name!r}: no such heads are shipped for {DEMO!r}; give the folder of yours")
    return source


def _exists(name: str) -> bool:
    try:
        return bool(name) and (shipped_folder(name) or Path(name)).is_dir()
    except FileNotFoundError:
        return False


def public_name(member: str) -> str:
    """A folder without those above it, which are nobody else's business; `heads` with the one that tells it apart."""
    parts = Path(member).parts
    if len(parts) < 2:
        return member
    return "/".join(parts[-2:] if parts[-1] == "heads" else parts[-1:])


def public_command(arguments: Sequence[str]) -> str:
    """A command line as it may be published: of absolute paths, the last part."""
    return " ".join(re.sub(r"(?<![\w.])/(?:[^/,+@\s]+/)+", "", argument) for argument in arguments)


def conditions_of(
    methods: Sequence[Method], temperatures: Sequence[float], rules: Sequence[str], batches: Sequence[int]
) -> list[tuple[Condition, Method]]:
    """The conditions of a run: the product of all, of which some are one.

    Rules are for treedec's own sampling. Without drafts there is nothing to accept, so `ar` runs under the first rule
    only. What transformers does not decode in batches is left out of those.

    Raises:
        ValueError: rules or numbers that make no sense, or a method that is left without any condition.
    """
    for rule in rules:
        acceptance_rule(rule, do_sample=True)
    if bad := [value for value in temperatures if not 0 <= value < float("inf")]:
        raise ValueError(f"a temperature must be 0 or more, not {bad[0]}")
    if bad := [size for size in batches if size < 1]:
        raise ValueError(f"a batch has at least 1 prompt, not {bad[0]}")
    if not (temperatures and rules and batches):
        raise ValueError("give at least one temperature, one acceptance rule and one batch size")
    conditions: dict[Condition, Method] = {}
    for batch in batches:
        for temperature in temperatures:
            for method in methods:
                if batch > 1 and not method.kind.batches:
                    continue
                own: Sequence[str | None] = (None,)
                if method.kind.ours:
                    own = rules if temperature else ("greedy",)
                    own = own[:1] if method.kind is Kind.AR else own
                for name in own:
                    conditions[Condition(method.name, temperature, name, batch)] = method
    if left := [method.name for method in methods if method not in conditions.values()]:
        raise ValueError(f"{left[0]} decodes one prompt at a time: add 1 to the batch sizes, or leave it out")
    return list(conditions.items())


@dataclass(frozen=True)
class Batch:
    """Prompts to decode together.

    Attributes:
        ids: `[B, L]` int64 on the target's device, padded on the left.
        mask: `[B, L]` int64, 0 where padded.
    """

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Decoded:
    """What a method returned, and when.

    Attributes:
        rows: per prompt all ids after it, as the method returned them, padding included.
        prefill_seconds, decode_seconds: see `treedec.benchmarks.results.Row`.
        stats: the method's own counts; None where it counts nothing, because each pass yields a token.
        first: tokens that its passes over prompts yielded by these counts, which belong to no pass in them.
        draft_seconds, target_seconds, places: of treedec's own methods, see `Meter` and `accepted_places`.
    """

    rows: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    stats: DecodingStats | None = None
    first: int = 0
    draft_seconds: float | None = None
    target_seconds: float | None = None
    places: dict[tuple[int, int], tuple[int, int]] | None = None


class Engine:
    """A target, and the ways to decode with it.

    Args:
        model, tokenizer: the target, which is left as it is.
        max_new_tokens: per prompt.
        draft_model: for the methods that need one; left as it is, too.
        draft_tokens: what these draft per pass, unless their name says otherwise.
        clock: takes all times, save those of peers; None for one that waits for the model's device.
        peers_folder: where the environments of peers lie.

    Attributes:
        eos: ids that end a text.
        pad: what texts that have ended are filled with in a batch; None only if none ends before the others.
        target: the model as treedec's loop sees it.
        peers: those that methods have asked for; they run until `close`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 128,
        draft_model: PreTrainedModel | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        clock: Clock | None = None,
        peers_folder: Path = PEERS_FOLDER,
    ):
        self.model, self.tokenizer, self.draft_model = model, tokenizer, draft_model
        self.max_new_tokens, self.draft_tokens = max_new_tokens, draft_tokens
        self.clock = clock or Clock(model.device)
        config = model.generation_config
        assert config is not None  # every model that generates has one
        eos = config.eos_token_id
        self.eos: tuple[int, ...] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self.pad: int | None = config.pad_token_id if config.pad_token_id is not None else next(iter(self.eos), None)
        self._meter = Meter(self.clock)
        self._drafters: dict[Method, MeteredDrafter] = {}  # they are immutable: conditions share them
        self.target = MeteredTarget(model, self._meter)
        self.peers = Peers(
            peers_folder, model, tokenizer, max_new_tokens=max_new_tokens, eos=self.eos, draft_model=draft_model
        )

    def close(self) -> None:
        """End what runs outside this process."""
        self.peers.close()

    def encode(self, prompts: Sequence[Prompt]) -> Batch:
        """The first turn of each prompt, up to where the answer starts."""
        rows = [encode_chat(self.tokenizer, prompt.turns[0])[0] for prompt in prompts]
        length = max(len(row) for row in rows)
        ids = torch.full((len(rows), length), self.pad or 0)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, length - len(row) :] = row
            mask[place, length - len(row) :] = 1
        return Batch(ids.to(self.model.device), mask.to(self.model.device))

    def prepare(self, condition: Condition, method: Method) -> Callable[[Batch], Decoded]:
        """The function that decodes under a condition; whatever it needs is loaded now.

        Raises:
            FileNotFoundError, ValueError: see `treedec.load_drafter`.
        """
        if method.kind is Kind.PEER:
            assert method.source is not None  # `parse_methods` gives every peer one
            name = method.source
            self.peers.start(name)
            return lambda batch: self._ask(batch, name, condition.temperature)
        arguments = self._arguments(condition.temperature)
        if not method.kind.ours:
            extra = self._extra(method)
            return lambda batch: self._generate(batch, {**arguments, **extra}, watched=bool(extra))
        if method not in self._drafters:
            self._drafters[method] = MeteredDrafter(self._drafter(method), self._meter)
        drafter = self._drafters[method]
        target = self.compiled_target if method.compiled else self.target
        return lambda batch: self._stream(batch, target, drafter, {**arguments, "acceptance": condition.acceptance})

    @property
    def drafters(self) -> list[tuple[str, Drafter]]:
        """Those of the methods prepared so far, by name; of several with the same weights the first."""
        found: dict[tuple[Kind, str | None], tuple[str, Drafter]] = {}
        for method, metered in self._drafters.items():
            found.setdefault((method.kind, method.source), (method.name, metered.drafter))
        return list(found.values())

    @cached_property
    def compiled_target(self) -> MeteredTarget:
        """`target`, but with compiled passes; compilation happens in the first ones, which are warm-up."""
        return MeteredTarget(self.model, self._meter, compile=True)

    @cached_property
    def _compiled_draft_model(self) -> Target:
        assert self.draft_model is not None  # who asks has made sure
        return Target(self.draft_model, compile=True)

    def _arguments(self, temperature: float) -> dict[str, Any]:
        arguments: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            # From the whole vocabulary: a top-k or top-p would make the target easier to guess.
            arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self.pad is not None:
            arguments["pad_token_id"] = self.pad
        return arguments

    def _drafter(self, method: Method) -> Drafter:
        if method.kind is Kind.AR:
            return treedec.load_drafter("none", self.model)
        if method.kind is Kind.VANILLA:
            draft_model = self._needed(method)
            return DraftModelDrafter(
                self._compiled_draft_model if method.compiled else draft_model,
                depth=self._chain(method, self.draft_tokens),
            )
        assert method.source is not None  # `parse_methods` gives every drafter one
        return treedec.load_drafter(method.source, self.model, tree=method.nodes)

    def _extra(self, method: Method) -> dict[str, Any]:
        """What tells transformers to decode with drafts."""
        if method.kind is Kind.HF_PROMPT_LOOKUP:
            return {"prompt_lookup_num_tokens": self._chain(method, _LOOKUP_TOKENS)}
        if method.kind is Kind.HF_ASSISTED:
            return {"assistant_model": constant_assistant(self._needed(method), self._chain(method, self.draft_tokens))}
        if method.kind is Kind.HF_ASSISTED_DEFAULT:
            return {"assistant_model": _own_assistant(self._needed(method))}
        return {}

    def _needed(self, method: Method) -> PreTrainedModel:
        if self.draft_model is None:
            raise ValueError(f"method {method.name!r} needs a draft model")
        return self.draft_model

    @staticmethod
    def _chain(method: Method, default: int) -> int:
        return default if method.nodes is None else method.nodes - 1

    def _generate(self, batch: Batch, arguments: dict[str, Any], watched: bool) -> Decoded:
        watch = PassWatch(self.clock)
        # Causal LMs are `GenerationMixin`s, which `PreTrainedModel` does not say.
        model = cast(GenerationMixin, self.model)
        started = self.clock.read()
        sequences = model.generate(
            batch.ids, attention_mask=batch.mask, stopping_criteria=StoppingCriteriaList([watch]), **arguments
        )
        length = batch.ids.shape[1]
        rows = cast(Tensor, sequences)[:, length:].tolist()
        finished = self.clock.read()
        first_token = watch.first_token
        assert first_token is not None  # `generate` makes one pass at least
        stats, first = None, 0
        if watched:
            # On some devices transformers asks once more than it commits.
            lengths = [seen for seen in watch.lengths if seen <= length + len(rows[0])]
            first = lengths[0] - length
            gained = [after - before for before, after in itertools.pairwise(lengths)]
            histogram = {size: gained.count(size) for size in sorted(set(gained))}
            stats = DecodingStats(len(gained), lengths[-1] - length, 0, len(gained), histogram)
        return Decoded(rows, first_token - started, finished - first_token, stats, first)

    def _ask(self, batch: Batch, peer: str, temperature: float) -> Decoded:
        # The seed that was set before this decode, in a range that all peers take.
        answer = self.peers.decode(peer, batch.ids[0].tolist(), temperature, torch.initial_seed() % 2**31)
        stats, first = None, 0
        if answer.steps is not None:
            first, gained = sum(answer.steps[:1]), answer.steps[1:]
            histogram = {size: gained.count(size) for size in sorted(set(gained))}
            stats = DecodingStats(len(gained), sum(answer.steps), 0, len(gained), histogram)
        return Decoded([list(answer.tokens)], answer.prefill_seconds, answer.decode_seconds, stats, first)

    def _stream(self, batch: Batch, target: Target, drafter: Drafter, arguments: dict[str, Any]) -> Decoded:
        stats, first = DecodingStats(), 0
        rows: list[list[int]] = [[] for _ in batch.ids]
        first_token = None
        started = self.clock.read()
        for block in treedec.stream(target, batch.ids, drafter, attention_mask=batch.mask, **arguments):
            stats.count(block)
            for row, tokens in zip(rows, block.tokens, strict=True):
                row += tokens
            if block.prefill:
                first += sum(map(len, block.tokens))
            if first_token is None:
                first_token = self.clock.read()
                self._meter.restart()
        finished = self.clock.read()
        assert first_token is not None  # the pass over the prompt yields a block
        meter = self._meter
        return Decoded(
            rows, first_token - started, finished - first_token, stats, first,
            meter.draft_seconds, meter.target_seconds, accepted_places(meter.rounds, self.eos),
        )  # fmt: skip


def constant_assistant(model: PreTrainedModel, tokens: int) -> PreTrainedModel:
    """The model, sharing its weights, as an assistant that drafts as treedec does: always so many tokens.

    transformers reads from the assistant's own generation configuration how it drafts; by default it stops where the
    assistant is unsure.
    """
    assistant = _own_assistant(model)
    config = assistant.generation_config
    assert config is not None  # every model that generates has one
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


def _own_assistant(model: PreTrainedModel) -> PreTrainedModel:
    """The model, sharing its weights, with a generation configuration of its own: transformers writes into it."""
    assistant = copy.copy(model)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    return assistant


def weights_digest(part: object) -> str:
    """Hex blake2b of 8 bytes over all weights of a module, of a `Target`'s model, or of what a drafter holds of these.

    Two drafters have it in common only if they have the same weights; without any, as n-gram look-up, all have.
    """
    digest, known = blake2b(digest_size=8), set[int]()
    for module in _modules(part):
        weights = sorted(module.state_dict().items())
        if all(weight.data_ptr() in known for _, weight in weights):
            continue  # the same once more, within another module
        known |= {weight.data_ptr() for _, weight in weights}
        for name, weight in weights:
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _modules(part: object) -> list[torch.nn.Module]:
    if isinstance(part, torch.nn.Module):
        return [part]
    if isinstance(part, Target):
        return [part.model]
    if isinstance(part, (tuple, list)):
        return [module for member in part for module in _modules(member)]
    if isinstance(part, Drafter):
        return [module for _, member in sorted(vars(part).items()) for module in _modules(member)]
    return []
