"""Training on several processes, one for each device: who does what, and what all must agree on.

`torchrun` and `accelerate launch` start them; `accelerate` joins them. On one process everything here is nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from transformers import PreTrainedModel

from treedec.models import on_device

# One process may compute features for hours while the others wait for it; the default gives up after some minutes.
_PATIENCE = timedelta(days=7)


def local_device() -> torch.device | None:
    """Where this of several processes should load its target: on a GPU of its own; None for one process alone."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or not torch.cuda.is_available():
        return None
    return torch.device("cuda", int(rank))


def join(model: PreTrainedModel, sharded: bool, log_folder: str | None = None) -> Accelerator:
    """This process among those that train together.

    Args:
        model: the target.
        sharded: it will be divided (`shard`), and may lie anywhere until then.
        log_folder: where tensorboard's files go; None for no such log.

    Raises:
        ValueError: there are several processes, and the target is not on the device of this one; or there is one only,
            and the target is to be divided.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if sharded and not several:
        raise ValueError(
            "shard_target divides the target over several processes, and this is the only one; start them with "
            "torchrun or accelerate launch"
        )
    device = model.device
    # Only if asked to use the CPU does accelerate join processes there.
    on_cpu = device.type == "cpu" and not (sharded and torch.accelerator.is_available())
    accelerator = Accelerator(
        # Precision is the trainer's: accelerate keeps one for the life of a process, whatever is trained in it.
        mixed_precision="no",
        cpu=several and on_cpu,
        log_with="tensorboard" if log_folder else None,
        project_dir=log_folder,
        kwargs_handlers=[
            # A step may hold no position that is supervised at some depth.
            DistributedDataParallelKwargs(find_unused_parameters=True),
            InitProcessGroupKwargs(timeout=_PATIENCE),
        ],
    )
    ours = accelerator.device
    if several and not sharded and (device.type != ours.type or (device.index or 0) != (ours.index or 0)):
        raise ValueError(
            f"process {accelerator.process_index} of {accelerator.num_processes} trains on {ours}, but its target is "
            f"on {device}; load the target of each process on `treedec.training.processes.local_device()`"
        )
    return accelerator


def shares(items: int, accelerator: Accelerator) -> list[tuple[int, bool]]:
    """Which of so many items this process takes, and whether each counts.

    Process `r` of `W` takes those that are `r` modulo W. All take equally many, because they compute in step; where
    there are too few, the first is taken once more and does not count.
    """
    places = range(accelerator.process_index, -(-items // accelerator.num_processes) * accelerator.num_processes)
    return [(place, True) if place < items else (0, False) for place in places[:: accelerator.num_processes]]


@contextmanager
def seeded(device: torch.device, *place: int) -> Iterator[None]:
    """Random numbers that depend on a place in the run alone, and leave the caller's as they were."""
    seed = int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)
    own = device.type == "cpu"
    devices = [] if own else [device.index or 0]
    with torch.random.fork_rng(devices, device_type="cuda" if own else device.type):
        # `torch.manual_seed` would also seed devices that are not restored.
        torch.default_generator.manual_seed(seed)
        if not own:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(seed)
        yield


def shard(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Divide the decoder layers of a frozen target over all processes, in place (FSDP2), and move it to their devices.

    A model that fits no device is loaded in the memory of the CPU: layer by layer, it comes to the device and all but
    one part of it goes again. In a forward pass each layer is gathered for as long as it computes. Embeddings and LM
    head stay whole on every process: heads read them apart from the model.

    Raises:
        ValueError: the model has no list of layers where transformers keeps one.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"the layers of {type(model).__name__} cannot be sharded: its decoder has no list `layers`")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in layers:
        # Said because each layer is a root of its own, and roots stay whole after their first pass.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    on_device(model, accelerator.device)  # the rest of it
