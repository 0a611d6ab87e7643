"""The device mesh and the one table that maps logical axis names to mesh axes."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv.core.errors import ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params, ParamSpec, declare_params
from pallas_kernels.quantized_matmul.weights import QuantizedWeight

LOGICAL_TO_MESH: dict[str, str] = {"vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


def build_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of ("data", "tensor") = (1, tensor_parallel_size) over the first devices. Raises ConfigError for too few."""
    devices = jax.devices()
    if len(devices) < tensor_parallel_size:
        hint = (
            "; on CPU, virtual devices come with XLA_FLAGS=--xla_force_host_platform_device_count=N"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but only {len(devices)} {devices[0].platform} "
            f"device(s) are here{hint}"
        )
    grid = np.array(devices[:tensor_parallel_size]).reshape(1, tensor_parallel_size)
    return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, config: ModelConfig, *, quantized: bool) -> dict[str, Any]:
    """A parameter-shaped tree of shardings. An axis that does not divide over its mesh axis is replicated."""

    def sharding(spec: ParamSpec) -> Any:
        axes = [_mesh_axis(mesh, name, size) for name, size in zip(spec.axes, spec.shape, strict=True)]
        values = NamedSharding(mesh, PartitionSpec(*axes))
        if spec.norm or not quantized:
            return values
        scales: Any = NamedSharding(mesh, PartitionSpec(*axes[: len(axes) - spec.inputs]))
        return QuantizedWeight(cast(Any, values), scales, kind="int8", rotated=True)

    shardings: dict[str, Any] = jax.tree.map(
        sharding, declare_params(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )
    return shardings


def logit_sharding(mesh: Mesh, config: ModelConfig) -> NamedSharding:
    """How logits [R, V] come out of a matmul with the vocabulary's table."""
    return NamedSharding(mesh, PartitionSpec(None, _mesh_axis(mesh, "vocab", config.vocab_size)))


def _mesh_axis(mesh: Mesh, name: str | None, size: int) -> str | None:
    """The mesh axis that a logical axis of this size lies on; None = replicated, as what does not divide is."""
    axis = LOGICAL_TO_MESH[name] if name else None
    return axis if axis and size % mesh.shape[axis] == 0 else None


def put_params(mesh: Mesh, config: ModelConfig, params: Params) -> Params:
    """Moves a host parameter tree (numpy) onto the mesh and empties it on the way: one leaf at a time is held twice."""
    quantized = isinstance(params["embed"], QuantizedWeight)
    return _move(params, param_shardings(mesh, config, quantized=quantized))


def _move(params: Params, shardings: dict[str, Any]) -> Params:
    placed: Params = {}
    for name in list(params):
        leaf = params[name]
        if isinstance(leaf, dict):
            placed[name] = _move(leaf, shardings[name])
        else:
            placed[name] = jax.block_until_ready(jax.device_put(leaf, shardings[name]))
        del leaf, params[name]
    return placed
