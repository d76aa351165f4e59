"""Settings for every test."""

import signal
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the shell that started the tests in the background had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
