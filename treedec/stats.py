"""What a generation cost and yielded, counted over the blocks that the decode loop yields."""

from __future__ import annotations

from dataclasses import dataclass, field

from treedec.decode import Committed


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
