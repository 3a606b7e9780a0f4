"""Export rounds to nearest, ties to even, as torch does."""

from __future__ import annotations

import numpy as np
import pytest

from nereus_common.checkpoints.casting import cast
from nereus_common.core.errors import InvalidInput

pytestmark = pytest.mark.fast


def test_bfloat16_is_what_torch_rounds_to() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    edges = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    values = np.concatenate([bits, ties, edges]).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    found, is_number = cast(values, "bfloat16", "x"), ~np.isnan(values)
    np.testing.assert_array_equal(found[is_number], expected[is_number])
    assert np.isnan((found[~is_number].astype(np.uint32) << 16).view(np.float32)).all()


def test_a_value_that_float16_cannot_hold_is_refused() -> None:
    assert cast(np.array([65504.0], np.float32), "float16", "x")[0] == 65504
    with pytest.raises(InvalidInput, match=r"model.norm.weight has values beyond 65504"):
        cast(np.array([1, 7e4], np.float32), "float16", "model.norm.weight")
