"""The decode loop: draft, verify, accept, commit, as an iterator of committed token blocks.

Vanilla speculative decoding is this loop with a draft-model drafter, plain decoding is this loop without drafts.
`generate`, streaming, the command line and the benchmarks consume the iterator; statistics are counted from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from treedec.acceptance import AcceptanceRule, Accepted, TreeView
from treedec.cache import SlotCache
from treedec.chance import Chance, ExponentialNoise, TorchChance
from treedec.drafter import Draft, Drafter, Drafting, DraftState, Outcome
from treedec.target import Target, Verified
from treedec.tree import TokenTree


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        input_ids: `[B, L]` prompt, left-padded.
        attention_mask: `[B, L]`, 0 where padded.
        max_length: L plus the most new tokens.
        processors: of each row; run on `([1, t], [1, V] float32)` once per committed token, as `generate` does.
        warpers: those processors that do not look at the prefix; they shape drafts.
        criteria: checked on every committed prefix.
    """

    input_ids: Tensor
    attention_mask: Tensor
    max_length: int
    processors: list[LogitsProcessorList]
    warpers: LogitsProcessorList
    criteria: StoppingCriteriaList


@dataclass(frozen=True)
class Committed:
    """One block of the output.

    Attributes:
        tokens: new tokens of each row, at least one for every unfinished row.
        drafted: candidates that were proposed to each row.
        finished: rows that are complete after this block.
        prefill: this block came from the pass over the prompt, which every way of decoding needs.
    """

    tokens: list[list[int]]
    drafted: list[int]
    finished: list[bool]
    prefill: bool = False


@dataclass
class _Rows:
    """The growing output of a batch; row `b` holds `ids[b, : lengths[b]]`, padding of the prompt included."""

    ids: Tensor  # [B, max_length] int64
    padding: list[int]
    lengths: list[int]
    finished: list[bool]
    texts: list[list[int]] = field(default_factory=list)

    def append(self, row: int, tokens: list[int]) -> None:
        self.ids[row, self.lengths[row] : self.lengths[row] + len(tokens)] = torch.tensor(tokens)
        self.texts[row] += tokens
        self.lengths[row] += len(tokens)


class Decoder:
    """One generation: the target, one drafter, one acceptance rule.

    Args:
        target: see `Target`.
        drafter: proposes the trees.
        rule: accepts paths.
        request: what to generate.
    """

    def __init__(self, target: Target, drafter: Drafter, rule: AcceptanceRule, request: Request):
        self.target, self.rule, self.request = target, rule, request
        batch, length = request.input_ids.shape
        ids = request.input_ids.new_zeros(batch, request.max_length)
        ids[:, :length] = request.input_ids
        real = request.attention_mask.bool()
        texts = [row[mask].tolist() for row, mask in zip(request.input_ids, real, strict=True)]
        self.rows = _Rows(ids, (~real).sum(1).tolist(), [length] * batch, [False] * batch, texts)
        self.prompt_length = length
        self.chance: Chance = TorchChance()
        self.noise: ExponentialNoise | None = None
        capacity = request.max_length + drafter.max_nodes
        self.cache: SlotCache = target.allocate(batch, capacity)
        self.session = drafter.start(target, batch, capacity)

    @torch.no_grad()
    def run(self) -> Iterator[Committed]:
        """Yield committed blocks until every row is finished."""
        if self.rule.drafting is Drafting.COUPLED:
            # Not before the first block is asked for: the seed may be set until then.
            self.noise = ExponentialNoise(len(self.rows.lengths), self.target.vocab_size, self.target.device)
        verified = self.target.prefill(self.cache, self.request.input_ids, self.request.attention_mask)
        draft = Draft(self._roots())
        yield self._commit(draft, self._accept(draft, verified), cached=True)
        hidden = verified.hidden[:, -1]
        while not all(self.rows.finished):
            if self.noise is not None:
                self.noise.follow()
            state = self._state(hidden)
            draft = self.session.propose(state)
            draft.tree.validate(self.target.vocab_size, state.room)
            draft.tree.check_roots([None if text is None else text[-1] for text in state.texts])
            verified = self.target.verify(self.cache, draft.tree)
            accepted = self._accept(draft, verified)
            last = torch.tensor([0 if path is None else path.nodes[-1] for path in accepted])
            hidden = verified.hidden[torch.arange(len(accepted)), last]
            yield self._commit(draft, accepted)

    def _roots(self) -> TokenTree:
        return TokenTree.chains(
            [[] if done else text[-1:] for text, done in zip(self.rows.texts, self.rows.finished, strict=True)]
        )

    def _state(self, hidden: Tensor) -> DraftState:
        rows, limit = self.rows, self.target.max_positions
        room = []
        for length, padding, done in zip(rows.lengths, rows.padding, rows.finished, strict=True):
            left = self.request.max_length - length - 1
            if limit is not None:
                left = min(left, limit - (length - padding))
            room.append(0 if done else max(left, 0))
        return DraftState(
            texts=[None if done else text for text, done in zip(rows.texts, rows.finished, strict=True)],
            hidden=hidden,
            room=room,
            budget=self.cache.free,
            drafting=self.rule.drafting,
            shape=self._shape,
            noise=self._noise_below_roots,
            chance=self.chance,
        )

    def _shape(self, logits: Tensor) -> Tensor:
        flat = logits.float().reshape(-1, logits.shape[-1])
        return _processed(self.request.warpers, None, flat).reshape(logits.shape)

    def _noise_below_roots(self, depth: int) -> Tensor:
        """`[B, V]`: the noise of the token `depth` levels below each row's root."""
        assert self.noise is not None
        rows = self.rows
        going = max(length for length, done in zip(rows.lengths, rows.finished, strict=True) if not done)
        # Finished rows have none of their own; any that exists will do.
        lengths = [going if done else length for length, done in zip(rows.lengths, rows.finished, strict=True)]
        steps = [length - self.prompt_length + depth - 1 for length in lengths]
        if len(set(steps)) == 1:
            return self.noise.at(steps[0])
        return torch.stack([self.noise.at(step)[row] for row, step in enumerate(steps)])

    def _accept(self, draft: Draft, verified: Verified) -> list[Accepted | None]:
        return [
            None if done else self.rule.accept(self._view(row, draft, verified.logits[row]))
            for row, done in enumerate(self.rows.finished)
        ]

    def _view(self, row: int, draft: Draft, logits: Tensor) -> TreeView:
        """One row of a verified tree; `logits` is `[N, V]`."""
        count = int(draft.tree.counts[row])
        tokens = draft.tree.tokens[row, :count].tolist()
        length, new = self.rows.lengths[row], self.rows.lengths[row] - self.prompt_length

        def prefix(path: list[int], *more: int) -> Tensor:
            """`[1, t]` ids up to and including a path below the root, written where they will be if committed."""
            extra = [tokens[node] for node in path[1:]] + list(more)
            if extra:
                self.rows.ids[row, length : length + len(extra)] = torch.tensor(extra)
            return self.rows.ids[row : row + 1, : length + len(extra)]

        def scores_at(node: int, path: list[int]) -> Tensor:
            # float32 whatever the model's dtype, as in `generate`; the copy lets processors write in place.
            scores = logits[node : node + 1].to(dtype=torch.float32, copy=True)
            processors = self.request.processors[row]
            return _processed(processors, prefix(path), scores)[0] if processors else scores[0]

        def noise_at(depth: int) -> Tensor:
            assert self.noise is not None  # rules that read it draft COUPLED
            return self.noise.at(new + depth)[row]

        return TreeView(
            tokens=tokens,
            children=draft.tree.children(row),
            scores_at=scores_at,
            stops_after=lambda path, token: bool(self.request.criteria(prefix(path, token), None)[0]),
            draft_at=lambda node: None if draft.probabilities is None else draft.probabilities[row, node],
            drawn=_drawn(draft, row, count),
            noise_at=noise_at,
            chance=self.chance,
        )

    def _commit(self, draft: Draft, accepted: list[Accepted | None], cached: bool = False) -> Committed:
        """Append accepted tokens, make their slots visible (unless the prefill already did) and tell the drafter."""
        rows, tree = self.rows, draft.tree
        kept = torch.zeros(tree.tokens.shape, dtype=torch.bool)
        tokens: list[list[int]] = []
        for row, path in enumerate(accepted):
            tokens.append(
                [] if path is None else [int(tree.tokens[row, node]) for node in path.nodes[1:]] + [path.token]
            )
            if path is not None:
                kept[row, path.nodes] = True
                rows.append(row, tokens[row])
                rows.finished[row] = path.finished
        if not cached:
            self.cache.commit(kept)
            self.session.observe(Outcome([[] if path is None else path.nodes for path in accepted], tokens))
        if self.noise is not None:
            going = [length for length, done in zip(rows.lengths, rows.finished, strict=True) if not done]
            self.noise.forget(min(going, default=max(rows.lengths)) - self.prompt_length)
            # After every block, so that an iterator that is abandoned has nothing left to put right.
            self.noise.settle(max(rows.lengths) - self.prompt_length)
        drafted = [max(int(count) - 1, 0) for count in tree.counts]
        return Committed(tokens, drafted, list(rows.finished), prefill=cached)


def _drawn(draft: Draft, row: int, count: int) -> list[bool]:
    if draft.probabilities is None or draft.drawn is None:
        return [draft.probabilities is not None] * count
    return draft.drawn[row, :count].tolist()


def _processed(processors: LogitsProcessorList, ids: Tensor | None, scores: Tensor) -> Tensor:
    """Scores after processors; `ids` may be None where none of them looks at the prefix.

    transformers declares `ids` a `LongTensor`, which no tensor is to a type checker.
    """
    return processors(cast(torch.LongTensor, ids), scores)


@dataclass
class DecodingStats:
    """Counts over committed blocks.

    Attributes:
        target_passes: forward passes of the target after the prefill.
        new_tokens: generated tokens, all rows together, the prefill's own included.
        drafted_tokens: candidates proposed.
        row_passes: passes summed over the rows that were unfinished in them.
        accepted_lengths: histogram: how often a row committed 1, 2, … tokens in a pass; its counts sum to `row_passes`.
    """

    target_passes: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    row_passes: int = 0
    accepted_lengths: dict[int, int] = field(default_factory=dict)

    def count(self, block: Committed) -> None:
        self.new_tokens += sum(len(tokens) for tokens in block.tokens)
        self.drafted_tokens += sum(block.drafted)
        if not block.prefill:
            self.target_passes += 1
            for tokens in block.tokens:
                if tokens:
                    self.row_passes += 1
                    self.accepted_lengths[len(tokens)] = self.accepted_lengths.get(len(tokens), 0) + 1

    @classmethod
    def merged(cls, parts: list[DecodingStats]) -> DecodingStats:
        """The counts of several generations together; their ratios are then pooled, not means of means."""
        total = cls()
        for part in parts:
            total.target_passes += part.target_passes
            total.new_tokens += part.new_tokens
            total.drafted_tokens += part.drafted_tokens
            total.row_passes += part.row_passes
            for length, times in part.accepted_lengths.items():
                total.accepted_lengths[length] = total.accepted_lengths.get(length, 0) + times
        return total

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a row commits per target pass after the prefill (exactly 1 for plain decoding; 0 before any pass).

        The first token, which the prefill yields, belongs to no such pass and is left out.
        """
        committed = sum(length * times for length, times in self.accepted_lengths.items())
        return committed / self.row_passes if self.row_passes else 0.0
