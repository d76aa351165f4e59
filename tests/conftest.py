"""Settings for every test."""

import pytest
import torch
from hypothesis import settings

# Tiny models lose more to handing work to threads than they gain from them.
torch.set_num_threads(1)

# The same examples in every run, and no deadline: how fast the machine is decides no test.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
