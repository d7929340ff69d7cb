"""Where C finds what it is handed: every address of a tensor or array passes here, and with it what C takes it for.

A wrong type, a gap or too few numbers would be followed beyond the memory that was meant, without a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def of_tensor(what: str, tensor: torch.Tensor, dtype: torch.dtype, length: int) -> int:
    """Raises TypeError for what is of another type, elsewhere or has gaps, IndexError for another number of numbers."""
    if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        gaps = "" if tensor.is_contiguous() else ", with gaps"
        raise TypeError(f"{what} must be {dtype} without gaps on a CPU, found {tensor.dtype} on {tensor.device}{gaps}")
    if tensor.numel() != length:
        raise IndexError(f"{what} must be {length} numbers, found {list(tensor.shape)}")
    return tensor.data_ptr()


def of_array(what: str, array: npt.NDArray[Any], dtype: type[np.generic], length: int) -> int:
    """As `of_tensor`."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        gaps = "" if array.flags.c_contiguous else ", with gaps"
        raise TypeError(f"{what} must be {dtype.__name__} without gaps, found {array.dtype}{gaps}")
    if array.size != length:
        raise IndexError(f"{what} must be {length} numbers, found {list(array.shape)}")
    address: int = array.__array_interface__["data"][0]  # `array.ctypes` makes an object for each question
    return address
