"""The decode loop: draft, verify, accept, commit, as an iterator of committed token blocks.

Vanilla speculative decoding is this loop with a draft-model drafter, plain decoding is this loop without drafts.
`generate`, streaming, the command line and the benchmarks consume the iterator; statistics are counted from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessorList, StoppingCriteriaList

from treedec.acceptance import AcceptanceRule, Accepted, TreeView, Walk, walk
from treedec.cache import SlotCache
from treedec.chance import Chance, ExponentialNoise, TorchChance
from treedec.drafter import Draft, Drafter, Drafting, DraftState, Outcome
from treedec.lockstep import Lockstep, check_finite, processed
from treedec.target import Target, Verified
from treedec.tree import TokenTree


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        input_ids: `[B, L]` prompt, left-padded.
        attention_mask: `[B, L]`, 0 where padded.
        max_length: L plus the most new tokens.
        processors: of each row, run on `([1, t], [1, V] float32)` once per committed token, as `generate` does; or
            one list for all of them, see `together`.
        warpers: those processors that do not look at the prefix; they shape drafts.
        criteria: checked on every committed prefix.
        together: whether processors and criteria get the whole batch, step by step, exactly as from `generate`. All
            rows then commit equally many tokens a pass.
        rows_end: whether a row whose criteria are met ends, or goes on until those of all rows are.
        pad: the id that fills ended rows; None only if rows do not end.
        foreign: names of processors and criteria that treedec knows nothing about.
        keep_scores, keep_logits: whether blocks carry the processed scores and the raw logits of their tokens.
        repairs_logits: whether transformers' own processor mends NaN and infinite logits, which are an error otherwise.
        generator: source of random numbers; None for the default generator of the model's device.
        chunk: most tokens of the prompt in one pass; None for the target's own.
    """

    input_ids: Tensor
    attention_mask: Tensor
    max_length: int
    processors: list[LogitsProcessorList]
    warpers: LogitsProcessorList
    criteria: StoppingCriteriaList
    together: bool = False
    rows_end: bool = True
    pad: int | None = None
    foreign: list[str] = field(default_factory=list)
    keep_scores: bool = False
    keep_logits: bool = False
    repairs_logits: bool = False
    generator: torch.Generator | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Committed:
    """One block of the output.

    Attributes:
        tokens: new tokens of each row, at least one for every unfinished row.
        drafted: candidates that were proposed to each row.
        finished: rows that are complete after this block.
        prefill: this block came from the pass over the prompt, which every way of decoding needs.
        scores: if asked for, `[V]` float32 scores after all processors, one for each of `tokens`.
        logits: if asked for, `[V]` float32 raw logits, one for each of `tokens`.
    """

    tokens: list[list[int]]
    drafted: list[int]
    finished: list[bool]
    prefill: bool = False
    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None


@dataclass
class _Rows:
    """The growing output of a batch; row `b` holds `ids[b, : lengths[b]]`, padding of the prompt included.

    `stopped` rows have met their criteria; unless rows end one by one, they go on until all have.
    """

    ids: Tensor  # [B, at least the longest row] int64
    padding: list[int]
    lengths: list[int]
    finished: list[bool]
    stopped: list[bool]
    texts: list[list[int]] = field(default_factory=list)

    def append(self, row: int, tokens: list[int]) -> None:
        self.write(row, self.lengths[row], tokens)
        self.texts[row] += tokens
        self.lengths[row] += len(tokens)

    def write(self, row: int | slice, place: int, tokens: list[int]) -> None:
        """Put tokens there, one after the other in one row, or one below the other in all; room is made as needed.

        The cap on the length may be far beyond what is generated, so it is not allocated for.
        """
        end = place + (len(tokens) if isinstance(row, int) else 1)
        if end > self.ids.shape[1]:
            self.ids = functional.pad(self.ids, (0, max(end, 2 * self.ids.shape[1]) - self.ids.shape[1]))
        values = torch.tensor(tokens, device="cpu")
        if isinstance(row, int):
            self.ids[row, place:end] = values
        else:
            self.ids[row, place] = values


class Decoder:
    """One generation: the target, one drafter, one acceptance rule.

    Args:
        target: see `Target`.
        drafter: proposes the trees.
        rule: accepts paths.
        request: what to generate.
    """

    def __init__(self, target: Target, drafter: Drafter, rule: AcceptanceRule, request: Request):
        self.target, self.rule, self.request, self.layers = target, rule, request, drafter.features
        batch, length = request.input_ids.shape
        ids = request.input_ids.long()
        real = request.attention_mask.bool()
        texts = [row[mask].tolist() for row, mask in zip(request.input_ids, real, strict=True)]
        self.rows = _Rows(ids, (~real).sum(1).tolist(), [length] * batch, [False] * batch, [False] * batch, texts)
        self.prompt_length = length
        self.chance: Chance = TorchChance(request.generator)
        self.noise: ExponentialNoise | None = None
        self.features: list[list[Tensor]] = [[] for _ in range(batch)]  # of each row, not yet shown to the drafter
        self.steps_drawn = 0  # positions whose noise has decided a token
        self.scores: list[dict[int, Tensor]] = [{} for _ in range(batch)]  # of each row's nodes in this round
        self.history: tuple[Tensor, ...] = ()  # `[B, V]` scores of every step, for criteria that get the whole batch
        capacity = request.max_length + drafter.max_nodes
        self.cache: SlotCache = target.allocate(batch, capacity)
        self.held = list(range(batch))  # rows of the batch that the cache holds and passes compute
        self.places = list(range(batch))  # where each row is among them; of a row that is not, any
        with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
            # A drafter that begins with random numbers must not shift those of the text.
            self.session = drafter.start(target, batch, capacity)

    @torch.no_grad()
    def run(self) -> Iterator[Committed]:
        """Yield committed blocks until every row is finished."""
        if self.rule.drafting is Drafting.COUPLED:
            # Not before the first block is asked for: the seed may be set until then.
            batch, vocab_size = len(self.rows.lengths), self.target.vocab_size
            self.noise = ExponentialNoise(batch, vocab_size, self.target.device, self.request.generator)
        hidden, block = self._read(self.request.input_ids, self.request.attention_mask)
        yield block
        while not all(self.rows.finished):
            if self.noise is not None:
                self.noise.follow()
            self._drop_finished()
            if self._restarts():
                self.cache = self.target.allocate(1, self.cache.capacity)
                text = torch.tensor([self.rows.texts[0]], device=self.target.device)
                hidden, block = self._read(text, None, known=text.shape[1] - 1)
                yield block
                continue
            state = self._state(hidden)
            draft = self.session.propose(state)
            draft.validate(self.target.vocab_size, state.room)
            texts, finished = self.rows.texts, self.rows.finished
            draft.tree.check_roots([None if done else text[-1] for text, done in zip(texts, finished, strict=True)])
            verified = self._verify(draft)
            if draft.tree.width > 1 and draft.probabilities is None and not bool(verified.hidden.isfinite().all()):
                # A drafted token that overflows would spoil its whole row, and later passes too: a masked value still
                # takes part in `0 · value`. Dropping a tree that was drawn for what it holds would bias the others.
                self.cache.erase()
                draft = Draft(self._roots())
                verified = self._verify(draft)
            accepted = self._accept(draft, verified)
            last = [0 if path is None else path.nodes[-1] for path in accepted]
            hidden = verified.hidden[self.places, last]
            yield self._commit(draft, verified, accepted)

    def _read(self, ids: Tensor, attention_mask: Tensor | None, known: int = 0) -> tuple[Tensor, Committed]:
        """Cache whole texts and commit the token that follows; `[B, H]` LM-head inputs, and the block.

        The features of the first `known` columns have been seen before.
        """
        verified = self.target.prefill(self.cache, ids, attention_mask, self.request.chunk, self.layers)
        if verified.features is not None:
            real = torch.ones_like(ids) if attention_mask is None else attention_mask
            for row, columns in enumerate(real[:, known:].bool()):
                self.features[row].append(verified.features[row, known:][columns])
        draft = Draft(self._roots())
        return verified.hidden[:, -1], self._commit(draft, verified, self._accept(draft, verified), cached=True)

    def _drop_finished(self) -> None:
        """Give up the keys and values of rows that have finished, which passes would compute on."""
        finished = self.rows.finished
        count = max(sum(not finished[row] for row in self.held), self.target.least_rows)
        if count < len(self.held):
            self.held = sorted(sorted(self.held, key=lambda row: finished[row])[:count])
            self.cache.select([self.places[row] for row in self.held])
            places = {row: place for place, row in enumerate(self.held)}
            self.places = [places.get(row, 0) for row in range(len(self.places))]

    def _verify(self, draft: Draft) -> Verified:
        """The trees of the rows that the cache holds."""
        return self.target.verify(self.cache, draft.tree.select(self.held), self.layers)

    def _roots(self) -> TokenTree:
        return TokenTree.chains(
            [[] if done else text[-1:] for text, done in zip(self.rows.texts, self.rows.finished, strict=True)]
        )

    def _room(self, row: int) -> int:
        """Levels below the root that the length cap and the model's positions leave to a row."""
        if self.rows.finished[row]:
            return 0
        room, root = self.request.max_length - self.rows.lengths[row] - 1, self._root_position(row)
        limit, switch = self.target.max_positions, self.target.rope_switch
        if limit is not None:
            if root >= limit:
                raise ValueError(
                    f"row {row} has reached the last of the model's {limit} positions: ask for fewer tokens"
                )
            room = min(room, limit - 1 - root)
        if switch is not None and (levels := switch.levels_below(root)) is not None:
            room = min(room, levels)
        return room

    def _root_position(self, row: int) -> int:
        return self.rows.lengths[row] - self.rows.padding[row] - 1

    def _restarts(self) -> bool:
        """Whether `generate` would now compute the whole text anew (a single row, see `arguments._check_positions`)."""
        switch = self.target.rope_switch
        return switch is not None and switch.restarts and self._root_position(0) == switch.position

    def _state(self, hidden: Tensor) -> DraftState:
        rows = self.rows
        return DraftState(
            texts=[None if done else list(text) for text, done in zip(rows.texts, rows.finished, strict=True)],
            hidden=hidden,
            features=self._new_features(),
            room=[self._room(row) for row in range(len(rows.lengths))],
            budget=self.cache.free,
            drafting=self.rule.drafting,
            shape=self._shape,
            noise=self._noise_below_roots,
            chance=self.chance,
            samples=self.rule.samples,
            costs=self.target.costs,
        )

    def _new_features(self) -> list[Tensor | None]:
        new: list[Tensor | None] = [torch.cat(parts) if parts else None for parts in self.features]
        self.features = [[] for _ in new]
        return [None if done else part for part, done in zip(new, self.rows.finished, strict=True)]

    def _shape(self, logits: Tensor) -> Tensor:
        flat = logits.float().reshape(-1, logits.shape[-1])
        return processed(self.request.warpers, None, flat).reshape(logits.shape)

    def _noise_below_roots(self, depth: int) -> Tensor:
        """`[B, V]`: the noise of the token `depth` levels below each row's root."""
        assert self.noise is not None
        rows = self.rows
        going = max(length for length, done in zip(rows.lengths, rows.finished, strict=True) if not done)
        # Finished rows have none of their own; any that exists will do.
        lengths = [going if done else length for length, done in zip(rows.lengths, rows.finished, strict=True)]
        steps = [length - self.prompt_length + depth - 1 for length in lengths]
        if len(set(steps)) == 1:
            return self.noise.at(steps[0]).clone()  # which a drafter may do with as it likes
        return torch.stack([self.noise.at(step)[row] for row, step in enumerate(steps)])

    def _accept(self, draft: Draft, verified: Verified) -> list[Accepted | None]:
        self.scores = [{} for _ in self.rows.finished]
        going = [row for row, done in enumerate(self.rows.finished) if not done]
        views = [self._view(row, draft, verified.logits[self.places[row]]) for row in going]
        try:
            if self.request.together and isinstance(self.rule, Walk):
                step = Lockstep(self, going, verified.logits)
                accepted = walk(self.rule, views, step.scores_after, step.stops_after)
            else:
                accepted = [self.rule.accept(view) for view in views]
        except BaseException:
            if self.noise is not None and not self.request.together:
                # `generate` would have drawn for the tokens up to here; rows in step have been settled at every step.
                self.noise.settle(self.steps_drawn)
            raise
        paths = dict(zip(going, accepted, strict=True))
        return [paths.get(row) for row in range(len(self.rows.finished))]

    def _view(self, row: int, draft: Draft, logits: Tensor) -> TreeView:
        """One row of a verified tree; `logits` is `[N, V]`."""
        count = int(draft.tree.counts[row])
        tokens = draft.tree.tokens[row, :count].tolist()
        length, new = self.rows.lengths[row], self.rows.lengths[row] - self.prompt_length

        def prefix(path: list[int], *more: int) -> Tensor:
            """`[1, t]` ids up to and including a path below the root, written where they will be if committed."""
            extra = [tokens[node] for node in path[1:]] + list(more)
            if extra:
                self.rows.write(row, length, extra)
            return self.rows.ids[row : row + 1, : length + len(extra)]

        def scores_at(node: int, path: list[int]) -> Tensor:
            scores = logits[node : node + 1].to(dtype=torch.float32, copy=True)
            if not self.request.repairs_logits:
                check_finite(scores, row, new + len(path) - 1)
            processors = self.request.processors[row]
            self.scores[row][node] = processed(processors, prefix(path), scores)[0] if processors else scores[0]
            return self.scores[row][node]

        def noise_at(depth: int) -> Tensor:
            assert self.noise is not None  # rules that read it draft COUPLED
            self.steps_drawn = max(self.steps_drawn, new + depth + 1)
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

    def _commit(
        self, draft: Draft, verified: Verified, accepted: list[Accepted | None], cached: bool = False
    ) -> Committed:
        """Append accepted tokens, make their slots visible (unless the prefill already did) and tell the drafter."""
        rows, tree = self.rows, draft.tree
        kept = torch.zeros(tree.tokens.shape, dtype=torch.bool, device="cpu")
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
            if verified.features is not None:
                for row, path in enumerate(accepted):
                    if path is not None:
                        self.features[row].append(verified.features[self.places[row], path.nodes])
            self.cache.commit(kept[self.held])
            self.session.observe(Outcome([[] if path is None else path.nodes for path in accepted], tokens))
        if self.noise is not None:
            going = [length for length, done in zip(rows.lengths, rows.finished, strict=True) if not done]
            self.noise.forget(min(going, default=max(rows.lengths)) - self.prompt_length)
            # After every block, so that an iterator that is abandoned has nothing left to put right.
            self.noise.settle(max(rows.lengths) - self.prompt_length)
        drafted = [max(int(count) - 1, 0) for count in tree.counts]
        nodes = [[] if path is None else path.nodes for path in accepted]
        keep_scores, keep_logits = self.request.keep_scores, self.request.keep_logits
        return Committed(
            tokens,
            drafted,
            list(rows.finished),
            prefill=cached,
            scores=[[self.scores[row][node] for node in path] for row, path in enumerate(nodes)]
            if keep_scores
            else None,
            logits=[list(verified.logits[self.places[row], path].float()) for row, path in enumerate(nodes)]
            if keep_logits
            else None,
        )


def _drawn(draft: Draft, row: int, count: int) -> list[bool]:
    if draft.probabilities is None or draft.drawn is None:
        return [draft.probabilities is not None] * count
    return draft.drawn[row, :count].tolist()
