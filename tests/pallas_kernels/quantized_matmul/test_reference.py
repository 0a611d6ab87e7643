"""The XLA path in scans over stacks and over devices, and what the entry point refuses on every backend."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quantized_matmul_oracle import expect
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantized_matmul.api import MAX_INT8_INPUTS, check_supported, quantized_matmul
from pallas_kernels.quantized_matmul.weights import KINDS, QuantizedWeight, partition_specs, quantize

matmul = jax.jit(quantized_matmul)


def problem(T: int, out: int, width: int, kind: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((T, width)), jnp.bfloat16)
    return x, quantize(rng.standard_normal((out, width)).astype(np.float32), kind, group=32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_over_a_stack_equals_its_layers(kind: Any) -> None:
    rng = np.random.default_rng(1)
    stack = jax.tree.map(jnp.asarray, quantize(rng.standard_normal((4, 128, 128)).astype(np.float32), kind))
    x = jnp.asarray(rng.standard_normal((8, 128)), jnp.bfloat16)

    def one(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return quantized_matmul(x, weight) * jnp.bfloat16(0.1)

    @jax.jit
    def sliced(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (one(x, weight), None), x, stack)[0]

    @jax.jit
    def indexed(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return quantized_matmul(x, stack, layer=i) * jnp.bfloat16(0.1), None

        return jax.lax.scan(layer, x, jnp.arange(4))[0]

    expected = x
    for i in range(4):
        expected = jax.jit(one)(expected, jax.tree.map(lambda array, i=i: array[i], stack))
    np.testing.assert_array_equal(sliced(x), expected)
    np.testing.assert_array_equal(indexed(x), expected)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("axes", [("tensor", None), (None, "tensor")], ids=["out", "in"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_devices(kind: Any, axes: tuple[str | None, str | None]) -> None:
    """Each device computes with its part alone; parts of the sum are added in float32."""
    x, weight = problem(5, 48, 256, kind)

    def local(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        part = quantized_matmul(x, weight, out_dtype=jnp.float32)
        return jax.lax.psum(part, "tensor") if axes[1] else part

    specs = partition_specs(kind, *axes)
    f = jax.shard_map(local, mesh=mesh(), in_specs=(P(None, axes[1]), specs), out_specs=P(None, axes[0]))
    got = jax.jit(f)(x, weight)
    expect(x, weight, got.dtype).check(got)


@pytest.mark.parametrize("axes", [("tensor", None), (None, "tensor")], ids=["out", "in"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_devices_partitioned_by_xla(kind: Any, axes: tuple[str | None, str | None]) -> None:
    x, weight = problem(5, 48, 256, kind)
    devices = mesh()
    placed = jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(devices, spec)), weight, partition_specs(kind, *axes)
    )
    got = matmul(x, placed)
    expect(x, weight, got.dtype).check(got)
    if kind == "int8":
        np.testing.assert_array_equal(got, matmul(x, weight))


def test_int8_weights_are_multiplied_as_bytes() -> None:
    """A scan copies the slice of a layer, byte for byte, and no wider copy of it exists."""
    L, out, width = 4, 1024, 1024
    shape = jax.ShapeDtypeStruct
    stack = QuantizedWeight(shape((L, out, width), jnp.int8), shape((L, out), jnp.float32), kind="int8")

    def f(x: jax.Array, stack: QuantizedWeight) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (quantized_matmul(x, weight), None), x, stack)[0]

    compiled = jax.jit(f).lower(shape((8, width), jnp.bfloat16), stack).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * out * width


def test_refusals() -> None:
    x, weight = problem(4, 8, 64, "int8")
    with pytest.raises(ValueError, match=r"shape \(4, 32\) do not fit a weight of shape \(8, 64\)"):
        quantized_matmul(x[:, :32], weight)
    with pytest.raises(ValueError, match="dtype float16 are not supported: they must be bfloat16 or float32"):
        quantized_matmul(x.astype(jnp.float16), weight)
    with pytest.raises(ValueError, match=r"\[L, out, in\] with `layer` \(given here\)"):
        quantized_matmul(x, weight, layer=jnp.int32(0))
    with pytest.raises(ValueError, match=r"with `layer` \(not given here\)"):
        quantized_matmul(x, jax.tree.map(lambda array: array[None], weight))
    with pytest.raises(ValueError, match="'cpu_native' returns bfloat16 or float32, not float16"):
        quantized_matmul(x, weight, out_dtype=jnp.float16, backend="cpu_native")
    with pytest.raises(ValueError, match="packed weight can be read by matmul backend 'cpu_native' only"):
        quantized_matmul(x, weight, packed=True)
    with pytest.raises(ValueError, match="matmul backend 'cuda' is unknown"):
        quantized_matmul(x, weight, backend="cuda")  # type: ignore[arg-type]


def test_check_supported() -> None:
    check_supported("reference", "int8", out_features=3, in_features=MAX_INT8_INPUTS)
    with pytest.raises(ValueError, match=f"133145 inputs could overflow int32 sums: at most {MAX_INT8_INPUTS}"):
        check_supported("reference", "int8", out_features=3, in_features=133_145)
    with pytest.raises(ValueError, match="'fp4' is unknown"):
        check_supported("reference", "fp4", out_features=3, in_features=64)
    with pytest.raises(ValueError, match="100 inputs cannot be cut into int4 groups of 64"):
        check_supported("reference", "int4", out_features=3, in_features=100, group=64)
    with pytest.raises(ValueError, match="3 x 0 is empty"):
        check_supported("reference", "fp8_e4m3", out_features=3, in_features=0)
