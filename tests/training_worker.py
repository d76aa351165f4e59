"""One process of a training run in a test: `python training_worker.py OUT '{"method": "eagle", …}'`.

Besides what a config takes: `dtype` of the target; `kill_after`, a step after which the process kills itself as
`kill -9` would; `interrupt_after`, one after which process 0 alone gets Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from training_runs import QUIET, config_of, corpus_of, random_samples, tiny_model

from treedec.training import loop
from treedec.training.runs import TrainingInterrupted
from treedec.training.trainer import train


def main(out: str, asked: str) -> None:
    torch.set_num_threads(1)
    changes = json.loads(asked)
    kill_after, interrupt_after = changes.pop("kill_after", None), changes.pop("interrupt_after", None)
    model = tiny_model().to(getattr(torch, changes.pop("dtype", "float32")))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    advance = loop.Run.advance

    def advance_and_stop(run: loop.Run) -> str:
        went = advance(run)
        if run.step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.step == interrupt_after and run.accelerator.is_main_process:
            os.kill(os.getpid(), signal.SIGINT)
        return went

    loop.Run.advance = advance_and_stop
    config = config_of(**changes)
    try:
        train(model, None, corpus_of(random_samples()), Path(out), config, console=QUIET)
    except TrainingInterrupted as interrupted:
        sys.exit(str(interrupted))
    if config.shard_target:
        held = [one.to_local().numel() / one.numel() for one in model.model.layers.parameters()]
        assert max(held) <= 0.5, "a process holds half of every layer, and all of the rest"
    else:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


if __name__ == "__main__":
    main(*sys.argv[1:])
