"""Optimizer state in a form that every kind of optimizer of the engine can load.

megatron-core's optimizers write the same moments under the same names, but differ in where main parameters are and
in what stands around the tensors, so a checkpoint of one kind does not load into another. Here only tensors and the
number of updates are kept; all else follows from the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from gnmr_megatron.distributed import engine_compat

# where each kind of optimizer keeps FP32 main parameters, as a prefix of the parameter's key; an FP32 model's
# parameters are their own
MAIN_PARAMETERS = {
    "distributed": "optimizer.state.param.",
    "mixed_precision": "optimizer.state.fp32_param.",
    "fp32": None,
}


class OptimizerState:
    """The state of an optimizer as sharded tensors, to be saved or to be filled.

    Args:
        engine: megatron-core optimizer.
        model: sharded state dict of its model chunks.
        metadata: the engine's choice of formats.
        is_loading: whether it is to be filled.
        saved_kind: kind of the optimizer that saved what it is filled with.
    """

    def __init__(
        self,
        engine: Any,
        model: Mapping[str, Any],
        metadata: Mapping[str, Any],
        *,
        is_loading: bool = False,
        saved_kind: str | None = None,
    ) -> None:
        self._engine = engine
        self._state = engine.sharded_state_dict(
            dict(model), is_loading=is_loading, metadata=dict(metadata)
        )
        for place, key in list(_places(self._state, LocalNonpersistentObject)):
            place[key] = place[key].unwrap()
        if saved_kind is not None and saved_kind != kind_of(engine):
            self._take_main_parameters_from(saved_kind)
        self._places = list(_places(self._state, ShardedBase))

    @property
    def tensors(self) -> dict[str, Any]:
        """The sharded tensors, by number."""
        return {str(number): place[key] for number, (place, key) in enumerate(self._places)}

    @property
    def num_updates(self) -> int:
        """Updates of the weights so far."""
        inner = self._inner()
        step = inner.get("state", {}).get("common_step")
        if step is None:
            step = inner["param_groups"][0].get("step") or 0
        return int(step)

    def load(self, tensors: Mapping[str, Any], *, num_updates: int) -> None:
        """Give the optimizer what was loaded for `tensors`."""
        for number, (place, key) in enumerate(self._places):
            place[key] = tensors[str(number)]
        inner = self._inner()
        counts_in_groups = engine_compat.adam_is_fused() or "state" not in inner
        if counts_in_groups:
            for group in inner["param_groups"]:
                group["step"] = num_updates
        else:
            inner["state"]["common_step"] = torch.tensor(float(num_updates))
        self._engine.load_state_dict(self._state)

    def _inner(self) -> dict[str, Any]:
        """The state dict of torch's optimizer within the engine's."""
        state: dict[str, Any] = self._state
        return state if "param_groups" in state else state["optimizer"]

    def _take_main_parameters_from(self, saved_kind: str) -> None:
        own, saved = MAIN_PARAMETERS[kind_of(self._engine)], MAIN_PARAMETERS[saved_kind]
        if own is None:
            return
        if saved is None:  # the model's parameters, which are loaded by now
            for number, parameter in enumerate(engine_compat.buffered_parameters(self._engine)):
                self._state["param_state"][number]["param"] = parameter.detach()
            return
        for place, key in _places(self._state, ShardedBase):
            tensor = place[key]
            if tensor.key.startswith(own):
                tensor.key = saved + tensor.key.removeprefix(own)


def kind_of(engine: Any) -> str:
    """Which kind of optimizer it is: a key of `MAIN_PARAMETERS`."""
    if engine_compat.uses_distributed_optimizer(engine):
        return "distributed"
    (single,) = engine_compat.single_optimizers(engine)
    return "mixed_precision" if hasattr(single, "fp32_from_float16_groups") else "fp32"


def _places(tree: Any, kind: type) -> Iterator[tuple[Any, Any]]:
    """Each container and key of a nested state dict at which an object of that kind stands."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, kind):
            yield tree, key
        elif isinstance(value, dict | list):
            yield from _places(value, kind)
