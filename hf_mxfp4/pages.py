"""Main memory: huge pages for large tensors, where the system gives them, and giving back what is free.

Fresh memory is given page by page as it is first written. On Linux a page is 4 kB unless a program asks for 2 MB ones
(`madvise(2)` with MADV_HUGEPAGE, where /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or `always`). With
them, filling and reading packed weights spends less time in the kernel and in address translation.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...] | torch.Size, device: torch.device, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An uninitialised tensor, on huge pages if it is large, in main memory, and the system has them."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    has_memory = type(tensor) is Tensor and not torch.compiler.is_compiling()  # a fake tensor has none
    if device.type == "cpu" and has_memory:
        advise(tensor.data_ptr(), tensor.nbytes)
    return tensor


def advise(address: int, size: int) -> None:
    """Asks for huge pages for the whole ones among `size` bytes of main memory; advice that may change nothing."""
    start = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    end = (address + size) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


def trim() -> None:
    """Gives memory that is free, but that glibc's allocator keeps for later, back to the system."""
    if sys.platform == "linux" and (release := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        release(ctypes.c_size_t(0))
