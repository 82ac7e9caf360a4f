"""Import megatron-core 0.16.1 without what only other programs need of it.

As it is imported it looks for W&B and TensorBoard, for its inference engine and its timers, and hands fifty functions
to torch.compile, which imports the compiler: more than a third of the time that a process takes to start. No verb
serves or writes timers, and on a CPU none of the functions is used as fused (`engine_compat.device_fields`). This is
for our own processes: a program of others that imports this package gets its megatron-core as it is. No torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = "megatron.core"
_UNUSED = ("wandb", "torch.utils.tensorboard")


def import_engine_leanly() -> None:
    """From now on, when megatron-core is first imported in this process, it finds no W&B and no TensorBoard.

    On a machine without CUDA it finds no compiler either. What it has not found is there again after its import.
    """
    if _ENGINE not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds megatron-core as the finders after it do, and changes how it is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes a module while some packages are hidden."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _hidden(_UNUSED), _uncompiled():
            self._loader.exec_module(module)


@contextlib.contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    absent = [name for name in names if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(absent))  # None: `import` raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in absent:
            del modules[name]


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    import torch

    namespace: Any = torch
    compiler = namespace.compile
    if not torch.cuda.is_available():
        namespace.compile = _as_it_is
    try:
        yield
    finally:
        namespace.compile = compiler


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
