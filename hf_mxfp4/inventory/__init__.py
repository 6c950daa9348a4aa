"""What a checkpoint holds, found without loading it: `hf-mxfp4 inspect`.

    kinds     what a tensor is for, by its name
    sources   what is looked into
    tensors   the tensors by kind, dtype and format, from the headers of files
    figures   of every group of 32 weights, from the bytes themselves
    memory    the memory that a model would take

Checkpoints are folders of safetensors files, one such file, GGUF files, or an index alone, whose names are counted.
"""

from __future__ import annotations

from .figures import GroupReport, Groups, groups
from .memory import Budget, budget
from .sources import Index, Source, open_source
from .tensors import Inventory, Row, Share, inventory

__all__ = [
    "Budget",
    "GroupReport",
    "Groups",
    "Index",
    "Inventory",
    "Row",
    "Share",
    "Source",
    "budget",
    "groups",
    "inventory",
    "open_source",
]
