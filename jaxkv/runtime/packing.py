"""The layers' weights of a placed parameter tree, packed for the native CPU kernels."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params, matrix_shapes
from jaxkv.runtime.mesh import replicated
from pallas_kernels.packed_weight.weight import PackedWeight, can_pack, pack


def packable(config: ModelConfig, params: Params) -> bool:
    """Whether all weights of the layers can be packed: their rows must be whole words of 4 bytes."""
    return all(can_pack(params["layers"][name], shape) for name, shape in matrix_shapes(config).items())


def pack_layers(config: ModelConfig, params: Params) -> Params:
    """The tree with the layers' weights packed where they lie. `params` is emptied of them on the way."""
    layers = dict(params["layers"])
    for name, shape in matrix_shapes(config).items():
        layers[name] = pack(params["layers"].pop(name), shape)
    return {**params, "layers": layers}


def packed_shardings(mesh: Mesh, config: ModelConfig, shardings: dict[str, Any]) -> dict[str, Any]:
    """A tree of shardings in the shape that `pack_layers` gives; for one device, where all are whole."""
    layers = shardings["layers"]
    packed = {
        name: PackedWeight(jax.tree.map(lambda _: replicated(mesh), layers[name])) for name in matrix_shapes(config)
    }
    return {**shardings, "layers": {**layers, **packed}}
