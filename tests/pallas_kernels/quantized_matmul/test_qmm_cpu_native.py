"""What only the native int8 matmul does: rows that nobody wants are not computed, a row is the same beside any others."""

import numpy as np
import pytest
from fixtures.quantized_matmul_cases import Case, alone, make_problem, multiply


@pytest.mark.parametrize("rotated", [False, True])
def test_a_row_is_the_same_in_every_batch_and_padding_is_not_computed(rotated: bool) -> None:
    problem = make_problem(Case("padded", "int8", 133, 100, 192, rotated=rotated))
    whole = multiply("cpu_native", problem)
    for rows in (1, 3, 8, 9, 64, 65, 132):
        np.testing.assert_array_equal(multiply("cpu_native", alone(problem, slice(rows))), whole[:rows])
        some = multiply("cpu_native", problem, rows=np.int32(rows))
        np.testing.assert_array_equal(some[:rows], whole[:rows])
        assert not some[rows:].any()
    assert not multiply("cpu_native", problem, rows=np.int32(-3)).any()
    np.testing.assert_array_equal(multiply("cpu_native", problem, rows=np.int32(1000)), whole)
