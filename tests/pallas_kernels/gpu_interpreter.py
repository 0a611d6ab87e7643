"""Runs Mosaic GPU kernels in JAX's interpreter, with what it lacks added: two forms of `wgmma`.

JAX's interpreter knows no accumulator that starts from a value, and no left operand in registers; both are simulated here, as
synchronous as its own `wgmma`. A race or a misuse of a barrier that it finds raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

_interpret = jaxpr_interpret.JaxprInterpreter.interpret
_interpret_wgmma = jaxpr_interpret.JaxprInterpreter._interpret_wgmma_ref_p


def _with_stores_as_wgmma(self: Any, jaxpr: Any, token: Any, *args: Any) -> Any:
    """The interpreter dispatches on primitives in one place: a store to an accumulator goes through the case of `wgmma`."""
    store = primitives.wgmma_accumulator_store_p
    eqns = [
        e.replace(primitive=primitives.wgmma_ref_p, params={"store": True}) if e.primitive is store else e
        for e in jaxpr.eqns
    ]
    return _interpret(
        self, jaxpr.replace(eqns=eqns) if any(e.primitive is store for e in jaxpr.eqns) else jaxpr, token, *args
    )


@gpu_callbacks.fail_on_exception
def _store(*, token: Any, acc: Any, value: Any, mesh_location: Any, thread: Any, source_info: Any) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    key = gpu_callbacks.HostAllocationKey.from_array(acc)
    memory.store_buffer_content(key, memory.access(key, ()), np.asarray(value), thread, logging_info=info)
    return token


@gpu_callbacks.fail_on_exception
def _multiply(
    *, token: Any, acc: Any, a: Any, b: Any, b_transforms: Any, mesh_location: Any, thread: Any, source_info: Any
) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    acc_key, b_key = (gpu_callbacks.HostAllocationKey.from_array(x) for x in (acc, b))
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(b_transforms))
    right, *_ = memory.get_buffer_content(b_key, memory.access(b_key, transforms), thread, logging_info=info)
    whole = memory.access(acc_key, ())
    total, *_ = memory.get_buffer_content(acc_key, whole, thread, logging_info=info)
    with np.errstate(invalid="ignore"):  # poisoned pages hold NaN: whether it reaches a result is what is tested
        total = total + np.asarray(a).astype(np.float32) @ np.asarray(right).astype(np.float32)
    memory.store_buffer_content(acc_key, whole, total, thread, logging_info=info)
    return token


def _wgmma(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
    call = functools.partial(callback.io_callback, token=token, mesh_location=self.mesh_location, thread=self.thread)
    done = gpu_callbacks.TOKEN_SHAPE_DTYPE
    if "store" in eqn.params:
        acc, value = get_invals()
        return call(functools.partial(_store, source_info=eqn.source_info), done, acc=acc, value=value), [value]
    if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
        return _interpret_wgmma(self, eqn, token, get_invals)
    acc, a, b, *leaves = get_invals()
    assert eqn.params["acc_transforms_tree"] is None
    transforms = jax.tree.unflatten(eqn.params["b_transforms_tree"] or jax.tree.structure([]), leaves)
    b, transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, transforms)
    return call(
        functools.partial(_multiply, source_info=eqn.source_info), done, acc=acc, a=a, b=b, b_transforms=transforms
    ), []


@contextlib.contextmanager
def gpu_interpreter() -> Iterator[None]:
    """Mosaic GPU kernels that are traced inside run in the interpreter, with races raising and fresh memory full of NaN."""
    cls = jaxpr_interpret.JaxprInterpreter
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    with (
        mock.patch.object(cls, "interpret", _with_stores_as_wgmma),
        mock.patch.object(cls, "_interpret_wgmma_ref_p", _wgmma),
        plgpu.force_gpu_interpret_mode(params),
    ):
        yield
