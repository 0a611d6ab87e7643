"""Matmul by weights kept in 8 or 4 bits: `api.quantized_matmul`, the container and the quantizer in `weights`."""
