"""Functions over a module, compiled by torch for the module as it is."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

_KERNELS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_ADAPTERS = ("_active_adapter", "_disable_adapters")  # where peft's layers keep what takes part


def emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a 16-bit dtype without instructions for it, as oneDNN sees it.

    torch has no public question to ask, and builds without oneDNN not even this one.
    """
    if dtype not in _KERNELS:
        return False
    return not torch.backends.mkldnn.is_available() or not getattr(torch.ops.mkldnn, _KERNELS[dtype])()


class Compiled:
    """A function that reads a module, compiled.

    It is compiled when first called, and again for inputs of another kind: another dtype or flag, or a dimension of
    size 1 where it was larger, or the reverse.

    Args:
        function: to compile; `module` and what hangs on it are the only weights it reads.
        module: what it takes for unchanged.
        device: where the module is. On the CPU its weights are packed for oneDNN, which takes their memory once more
            for every kind of inputs; not if their dtype is `emulated`.
        changes_itself: buffers and values of the module may change while it runs; they are then no constants.
        hooked: a part of the module whose hooks come and go.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        device: torch.device,
        changes_itself: bool = False,
        hooked: nn.Module | None = None,
    ):
        self._module, self._hooked, self._changes_itself = module, hooked, changes_itself
        # oneDNN packs no weights of a dtype that it has no kernels for, and what freezing leaves of them is multiplied
        # by torch in the slowest way: 310 ms a pass of the demo target in bfloat16 on AVX2, where weights as they are
        # take 55.
        emulates = any(emulated(weight.dtype) for weight in module.parameters())
        self._frozen = device.type == "cpu" and not emulates
        self._assumed = self._assumptions()
        inductor, config = torch._dynamo.lookup_backend("inductor"), importlib.import_module("torch._inductor.config")
        # To check before each call that no module has changed takes a twelfth of the demo target's pass; `changes` is
        # asked once a text, in 2.6 ms. A module that changes itself keeps its guards, and so do all before torch 2.8.
        unguarded = getattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe", None)
        options = None if unguarded is None or changes_itself else {"guard_filter_fn": unguarded}
        # Else what is compiled of the same function for other modules counts against the limit on recompilations.
        apart: dict[str, Any] = (
            {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
        )
        # A backend of its own: code compiled by an equal one is shared between modules, which without those guards are
        # not told apart, and weights that are frozen in it would be another one's.
        self._run = torch.compile(
            function, dynamic=True, backend=lambda graph, inputs: inductor(graph, inputs), options=options, **apart
        )
        # On the CPU, freezing makes constants of the weights and packs them, and layers that read the same input become
        # one (q, k and v; gate and up): 23 ms a pass of the demo target became 19 by the first, 14 became 11 by the
        # second and the guards. It is asked for while tracing, which the `options` of torch.compile do not reach.
        settings = {"freezing": self._frozen}
        if hasattr(config.cpp, "enable_concat_linear"):
            settings["cpp.enable_concat_linear"] = self._frozen
        self._settings = config.patch(settings)
        # Beyond the limit inputs of a new kind run as if nothing had been compiled, with no more than a warning.
        self._limit = torch._dynamo.config.patch(recompile_limit=64)
        # Sizes that happen to be equal in the first call (keys and the width of a head: 64) are not the same size.
        shapes = importlib.import_module("torch.fx.experimental._config")
        self._shapes = shapes.patch(use_duck_shape=False)

    def __call__(self, *arguments: Any) -> Any:
        with torch.no_grad(), self._settings, self._limit, self._shapes:
            return self._run(*map(_unstrided, arguments))

    def changes(self) -> list[str]:
        """Names of the weights and modules that are no longer what was compiled."""
        present, assumed = self._assumptions(), self._assumed
        return [name for name in {**assumed, **present} if assumed.get(name) != present.get(name)]

    def _assumptions(self) -> dict[str, object]:
        """What is taken for granted, by name: weights, and all plain values and hooks of modules."""
        found: dict[str, object] = {name: self._of_tensor(weight) for name, weight in self._module.named_parameters()}
        if not self._changes_itself:
            found |= {name: self._of_tensor(buffer) for name, buffer in self._module.named_buffers()}
            found |= {f"{name}: a module": self._of_module(part) for name, part in self._module.named_modules()}
        return found

    def _of_tensor(self, tensor: Tensor) -> object:
        # Weights that are not frozen are read anew in every pass. Tensors of inference mode count no changes.
        version = tensor._version if self._frozen and not tensor.is_inference() else None
        return _Reference(tensor), tensor.dtype, tensor.device, tensor.data_ptr(), version

    def _of_module(self, module: nn.Module) -> object:
        # `hooked` is hooked maybe on another thread just now. transformers hooks layers when hidden states are first
        # asked for, and never unhooks them.
        hooks = {} if module is self._hooked else {**module._forward_hooks, **module._forward_pre_hooks}
        foreign = [key for key, hook in hooks.items() if not str(hook.__module__).startswith("transformers.")]
        values = {name: _plain(value) for name, value in vars(module).items() if name[:1] != "_" or name in _ADAPTERS}
        return type(module), foreign, values


def _unstrided(argument: object) -> object:
    """A tensor with the strides of its own shape; anything else as it is.

    What is cut from a wider tree has the wider one's, and would be compiled anew. Of a single row torch says even then
    that it is contiguous, and `contiguous()` keeps its strides.
    """
    if not isinstance(argument, Tensor):
        return argument
    own = tuple(math.prod(argument.shape[place + 1 :]) for place in range(argument.dim()))
    if argument.stride() == own:
        return argument
    return argument.clone(memory_format=torch.contiguous_format)


class _Reference(weakref.ref[Tensor]):
    """A weak reference to a tensor, equal only to those to the same one (where `weakref.ref` compares the tensors)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and self() is not None and self() is other()


def _plain(value: object) -> object:
    """A value that a pass may depend on, copied if it is a list; None for anything that is more than a value."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(member) for member in value)
    return value if isinstance(value, (bool, int, float, str)) else None
