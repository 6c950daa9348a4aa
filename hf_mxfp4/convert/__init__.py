"""Checkpoints on disk, converted from one dialect to another and compared, without building a model.

experts      the pivot: experts of any layout as canonical matrices
layout       what a file of a dialect holds for them
shards       files that are written piece by piece
conversion   from one checkpoint to another
comparison   whether two hold the same
"""

from .comparison import Difference, Verdict, verify
from .conversion import TARGETS, Conversion, convert

__all__ = ["TARGETS", "Conversion", "Difference", "Verdict", "convert", "verify"]
