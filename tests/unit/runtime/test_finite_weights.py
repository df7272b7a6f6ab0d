"""Weights that are no numbers are refused at load: integers would hide them from every later check."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ai_engine.ports.errors import ModelFileError
from ai_engine.ports.model import BLOCK, SCALE_OFFSETS, DType
from ai_engine.runtime.weights import check_scales


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", sorted(SCALE_OFFSETS))
def test_a_scale_that_is_no_number_names_its_tensor(dtype: DType, bad: float) -> None:
    size = BLOCK[dtype][1]
    for offset in SCALE_OFFSETS[dtype]:
        raw = np.full((3, 2 * size), 0x11, np.uint8)
        check_scales("blk.0.ffn_up.weight", dtype, raw)
        raw[2, size + offset : size + offset + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
        with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight"):
            check_scales("blk.0.ffn_up.weight", dtype, raw)


def test_every_quantised_type_is_checked() -> None:
    assert set(SCALE_OFFSETS) == {dtype for dtype in DType if BLOCK[dtype][0] > 1}


def test_a_norm_that_is_no_number_is_refused(tmp_path: Path) -> None:
    from tests.golden.engine import engine_of
    from tests.golden.tiny_gguf import read_gguf, write_random

    path = tmp_path / "nan.gguf"
    write_random(path, "F32", "llama")
    whole = bytearray(path.read_bytes())
    norm = np.asarray(read_gguf(path).tensors["output_norm.weight"][:], np.float32).tobytes()
    at = bytes(whole).rindex(norm)
    whole[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(bytes(whole))
    with pytest.raises(ModelFileError, match=r"output_norm\.weight"), engine_of(path, kernels="reference"):
        pass
