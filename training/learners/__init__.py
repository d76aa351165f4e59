"""Methods that can be trained: one learner for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treedec.training.contracts import Learner
from treedec.training.learners.draft_model import DraftModelLearner, DraftModelOptions
from treedec.training.learners.eagle import Eagle1Learner, Eagle3Learner, Eagle3Options, EagleOptions
from treedec.training.learners.heads import (
    HydraLearner,
    HydraOptions,
    MedusaLearner,
    MedusaOptions,
    RecurrentLearner,
    RecurrentOptions,
)
from treedec.training.learners.medusa2 import Medusa2Learner, Medusa2Options


@dataclass(frozen=True)
class LearnerType:
    """How one method is trained.

    Attributes:
        options: a frozen dataclass of what only this method knows, with a default for every field.
        build: makes a learner as `build(model, options, draft_ids, labels=...)`, see `HeadLearner`.
        learning_rate: what suits it; tried on the demo target where it is not 1e-3.
        copies_layers: whether, with some options, it copies layers of the target, which then cannot be sharded.
        through_target: gradients pass through the target's layers, in its dtype.
    """

    options: type[Any]
    build: Callable[..., Learner]
    learning_rate: float = 1e-3
    copies_layers: Callable[[Any], bool] = lambda options: False
    through_target: bool = False


# A new method is one line here.
LEARNERS: Mapping[str, LearnerType] = {
    "medusa": LearnerType(MedusaOptions, MedusaLearner.build, 3e-3),
    "medusa2": LearnerType(
        Medusa2Options, Medusa2Learner.build, copies_layers=lambda options: True, through_target=True
    ),
    "hydra": LearnerType(HydraOptions, HydraLearner.build),
    "recurrent": LearnerType(RecurrentOptions, RecurrentLearner.build),
    "eagle": LearnerType(EagleOptions, Eagle1Learner.build),
    "eagle3": LearnerType(Eagle3Options, Eagle3Learner.build),
    "draft-model": LearnerType(
        DraftModelOptions, DraftModelLearner.build, copies_layers=lambda options: options.model is None
    ),
}
