"""Formats in which weights are gathered, one per file, behind the interface in :mod:`etp.formats.base`."""

from __future__ import annotations

from etp.formats.apart import ApartFormat
from etp.formats.base import Quantization, WeightFormat
from etp.formats.fp8 import scale_of, to_e4m3
from etp.formats.fp8_block import Float8Block, quantize_blocks
from etp.formats.fp8_tensor import Float8PerTensor
from etp.formats.mxfp8 import MXFP8, quantize_mxfp8
from etp.formats.nvfp4 import NVFP4, quantize_nvfp4
from etp.formats.quantized import amax_of

__all__ = [
    "MXFP8",
    "NVFP4",
    "ApartFormat",
    "Float8Block",
    "Float8PerTensor",
    "Quantization",
    "WeightFormat",
    "amax_of",
    "quantize_blocks",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "scale_of",
    "to_e4m3",
]
