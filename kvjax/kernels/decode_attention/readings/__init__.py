"""The ways of reading a cache, one file each: operands, definition, tiles in plain JAX, FLOPs.

A new way is a new file; `reading.py` says what is in it. Kernels for TPU and GPU know some of them.
"""

from kvjax.kernels.decode_attention.readings.factored import FactoredReading
from kvjax.kernels.decode_attention.readings.grouped import GroupedReading
from kvjax.kernels.decode_attention.readings.latent import LatentReading
from kvjax.kernels.decode_attention.readings.latent_residual import LatentResidualReading
from kvjax.kernels.decode_attention.readings.reading import DecodeFlops
from kvjax.kernels.decode_attention.readings.reading import PositionBias
from kvjax.kernels.decode_attention.readings.reading import Reading
from kvjax.kernels.decode_attention.readings.reading import SlopeBias
from kvjax.kernels.decode_attention.readings.rebuilt import RebuiltReading
from kvjax.kernels.decode_attention.readings.residual import ResidualReading
from kvjax.kernels.decode_attention.readings.tensor_product import TensorProductReading
from kvjax.kernels.decode_attention.readings.tied import TiedReading

__all__ = [
    "DecodeFlops",
    "FactoredReading",
    "GroupedReading",
    "LatentReading",
    "LatentResidualReading",
    "PositionBias",
    "Reading",
    "RebuiltReading",
    "ResidualReading",
    "SlopeBias",
    "TensorProductReading",
    "TiedReading",
]
