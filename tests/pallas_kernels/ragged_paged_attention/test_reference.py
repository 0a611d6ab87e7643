"""The XLA backend on the cases of every backend."""

import jax
import numpy as np
import pytest
from fixtures.attention_cases import CASES, LAYER, Case, make_batch, relative_error

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != "int8"], ids=lambda case: case.name)
def test_matches_the_dense_oracle(case: Case) -> None:
    batch = make_batch(case)
    out = ragged_paged_attention(
        batch.q,
        batch.kv,
        jax.numpy.int32(LAYER),
        batch.page_table,
        batch.cu_q_lens,
        batch.kv_lens,
        batch.num_seqs,
        layout=case.layout,
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        logit_soft_cap=case.soft_cap,
        sinks=batch.sinks,
        backend="reference",
    )
    assert relative_error(out[: batch.tokens], batch.expected) < case.tolerance
    assert np.isfinite(np.asarray(out, np.float32)).all()
