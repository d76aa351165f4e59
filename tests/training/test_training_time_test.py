"""What a learner unrolls over a whole pack is what its drafter computes step by step, at every position and depth.

The drafter reads the text as it does in a generation: token by token, with keys and values of its own and the target's,
drafting a chain along the text's own tokens from every position.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import batch_of
from kit import VOCAB, fresh_model, tiny_model

from treedec.drafter import Drafting, DraftState
from treedec.growth import DynamicTree
from treedec.heads.checkpoint import METHODS
from treedec.heads.eagle import EagleConfig, EagleHead
from treedec.target import Target
from treedec.training.learners import LEARNERS
from treedec.training.learners.eagle import (
    Eagle1Learner,
    Eagle3Learner,
    Eagle3Options,
    EagleOptions,
)
from treedec.training.learners.heads import HydraOptions, RecurrentOptions
from treedec.training.losses import draft_logits

DEPTHS = 4
TRIMMED = torch.arange(0, VOCAB, 2)
# Several runs, one from the first token on, none at all, one token; the last one's chains begin at the text's end, too.
LENGTHS = (14, 9, 11, 1, 17)
RESPONSES = ([(3, 7), (9, 14)], [(0, 6)], [], [(0, 1)], [(2, 17)])


def texts(seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def generic(learner, seed=0):
    """No weight is 0 or 1, so that nothing drops out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.parameters():
            drawn = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn + (parameter.dim() == 1))
    return learner.eval()


def built(method, options):
    return lambda model: LEARNERS[method].build(model, options, TRIMMED)


def eagle(version=3, **changes):
    """A head of a shape that no option asks for, but that is drafted with."""

    def build(model):
        config = EagleConfig(
            hidden_size=32, vocab_size=VOCAB, draft_vocab_size=len(TRIMMED), target_hidden_size=32,
            intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, version=version,
            features=(0, 1, 2) if version == 3 else (),
        )  # fmt: skip
        head = EagleHead(replace(config, **changes), TRIMMED)
        if version == 1:
            return Eagle1Learner(head, model, EagleOptions(depths=DEPTHS), "soft")
        return Eagle3Learner(head, model, Eagle3Options(depths=DEPTHS), "soft")

    return build


BUILDERS = {
    "eagle": built("eagle", EagleOptions(depths=DEPTHS)),
    "eagle-one-step": built("eagle", EagleOptions(depths=1)),
    "eagle-biases": eagle(1, attention_bias=True, fc_bias=True),
    "eagle3": built("eagle3", Eagle3Options(depths=DEPTHS)),
    "eagle3-residual-normed": built("eagle3", Eagle3Options(depths=DEPTHS, norm_before_residual=True)),
    "eagle3-fc-norm": built("eagle3", Eagle3Options(depths=DEPTHS, fc_norm=True, layers=(1,), intermediate_size=40)),
    "eagle3-one-kv": eagle(num_key_value_heads=1, qk_norm=True),
    "eagle3-no-groups": eagle(num_key_value_heads=4, head_dim=6),
    "eagle3.1": eagle(norm_output=True, norm_before_fc=True),
    "hydra": built("hydra", HydraOptions(heads=DEPTHS, blocks=2)),
    "hydra-prefix": built("hydra", HydraOptions(heads=DEPTHS, prefix=True)),
    "recurrent": built("recurrent", RecurrentOptions(depths=DEPTHS)),
    "recurrent-bare": built("recurrent", RecurrentOptions(depths=DEPTHS, state_size=16, layers=())),
}


def drafted(learner, model, batch):
    """`{(row, position, depth): [Vd] logits}` of chains along the text, wherever it is long enough."""
    method = next(name for name, one in METHODS.items() if type(learner.heads) is one.heads)
    growth = DynamicTree(nodes=8, depth=DEPTHS, width=1)
    drafter = METHODS[method].drafter(learner.heads, model, growth)
    target, rows = Target(model), [ids[:length] for ids, length in zip(batch.input_ids, batch.lengths, strict=True)]
    hidden, features = [], []
    for row in rows:  # in chunks of three, with the target's cache, as a prompt is read
        reads = [
            target.prefill(target.allocate(1, len(row) + 3), row[None], chunk=3, features=layers).features
            for layers in ((), drafter.features)
        ]
        hidden.append(reads[0][0])
        features.append(None if drafter.features is None else reads[1][0])
    session = drafter.start(target, len(rows), max(LENGTHS))
    found = {}
    for p in range(max(LENGTHS) - 1):
        alive = [p + 1 < len(row) for row in rows]
        state = DraftState(
            texts=[row[: p + 2].tolist() if here else None for row, here in zip(rows, alive, strict=True)],
            hidden=torch.stack([known[min(p, len(known) - 1)] for known in hidden]),
            features=[
                new[p : p + 1] if here and new is not None else None for new, here in zip(features, alive, strict=True)
            ],
            room=[DEPTHS] * len(rows), budget=64, drafting=Drafting.TOP,
            shape=lambda logits: logits, noise=None, chance=None,
        )  # fmt: skip
        logits = session.begin(state)
        for depth in range(learner.depths):
            if depth:
                token = torch.tensor([[int(row[p + 1 + depth]) if p + 1 + depth < len(row) else 0] for row in rows])
                logits = session.expand(token, torch.full_like(token, depth - 2))[:, 0]
            for row, text in enumerate(rows):
                if p + 1 + depth < len(text):
                    found[row, p, depth] = logits[row]
    return found


@pytest.mark.parametrize("name", BUILDERS)
@torch.no_grad()
def test_every_position_unrolls_what_it_drafts(name):
    model = tiny_model()
    learner = generic(BUILDERS[name](model))
    batch = batch_of(model, texts(), RESPONSES, learner.layers)
    expected, width = drafted(learner, model, batch), batch.input_ids.shape[1]
    everywhere = (torch.arange(width) < batch.lengths[:, None]).flatten().nonzero()[:, 0]
    runs = (batch.runs >= 0).flatten().nonzero()[:, 0]
    for rows in (runs, learner.rows(batch), everywhere, runs[3:4]):
        states = learner.unroll(batch, rows)
        assert states.shape == (learner.depths, len(rows), 32)
        check(learner, states, rows, width, expected, 1e-9)


def check(learner, states, rows, width, expected, tolerance):
    """Compare wherever the text has the tokens that the chain reads."""
    for depth in range(learner.depths):
        logits = draft_logits(states[depth], learner._frozen.head)
        for ours, position in zip(logits, rows.tolist(), strict=True):
            row, p = divmod(position, width)
            if p + 1 + depth < LENGTHS[row]:
                torch.testing.assert_close(ours, expected[row, p, depth], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "hydra-prefix", "recurrent"])
@torch.no_grad()
def test_on_targets_of_other_shapes(name, method):
    """Scaled embeddings and capped scores, heads of another size, no groups, no rotary embeddings at all."""
    model = tiny_model(name)
    learner = generic(BUILDERS[method](model))
    batch = batch_of(model, texts(), RESPONSES, learner.layers)
    rows = learner.rows(batch)
    # Gemma's attention computes its softmax in float32, so that it matters how much of a text one pass reads.
    tolerance = 1e-4 if name == "gemma2" else 1e-9
    expected = drafted(learner, model, batch)
    check(learner, learner.unroll(batch, rows), rows, batch.input_ids.shape[1], expected, tolerance)


@torch.no_grad()
def test_a_head_drafts_with_the_rotary_base_of_its_target():
    model = fresh_model(rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    for learner in (BUILDERS["eagle"](model), BUILDERS["eagle3"](model)):
        assert learner.heads.config.rope_parameters["rope_theta"] == 123.0


@pytest.mark.parametrize("name", ["eagle", "eagle3", "hydra-prefix", "recurrent"])
@torch.no_grad()
def test_what_comes_later_or_in_other_rows_changes_nothing(name):
    """Padding, the prompts after a response, and the conversations that share the pack."""
    model = tiny_model()
    learner = generic(BUILDERS[name](model))
    batch = batch_of(model, texts(), RESPONSES, learner.layers)
    rows = learner.rows(batch)
    states = learner.unroll(batch, rows)
    width = batch.input_ids.shape[1]
    for row in (rows // width).unique().tolist():
        mine = rows // width == row
        end = max(end for _, end in RESPONSES[row])  # the text alone, cut where its last response ends
        alone = batch_of(model, [batch.input_ids[row, :end].tolist()], [RESPONSES[row]], learner.layers)
        unrolled = learner.unroll(alone, rows[mine] % width)
        for depth in range(learner.depths):
            taught = alone.supervised(1 + depth)[0, rows[mine] % width]
            torch.testing.assert_close(unrolled[depth, taught], states[depth, mine][taught], atol=1e-9, rtol=0)
