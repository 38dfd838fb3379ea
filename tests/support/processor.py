"""Markers of tests that hold on some processors only: elsewhere they are skipped, with the reason.

They ask what runs and not what the processor is: variables such as ONEDNN_MAX_CPU_ISA=AVX2 hold torch's libraries to
fewer instructions than it has.
"""

import pytest

from fnmodels.ops.torch_internals import MATRIX_TILES, has_bf16_products

needs_bf16_products = pytest.mark.skipif(
    not has_bf16_products(), reason="oneDNN has no bf16 products on this CPU, which needs AVX-512 on x86"
)
needs_matrix_tiles = pytest.mark.skipif(
    not MATRIX_TILES, reason="which kernels add in another order is known of CPUs with AMX"
)
