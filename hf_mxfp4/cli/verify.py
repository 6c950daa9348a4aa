"""Compare the experts of two checkpoints byte for byte, in whatever dialects."""

from __future__ import annotations

import argparse
import json

from ..convert import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two checkpoints."""
    parser.add_argument("first", metavar="A", help="folder of safetensors files, or one")
    parser.add_argument("second", metavar="B", help="another")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, and no output beside the exit status")


def run(options: argparse.Namespace) -> int:
    """Prints the first difference; 1 if there is one."""
    found = verify(options.first, options.second, progress=not options.quiet)
    status = 0 if found.difference is None else 1
    if options.json:
        difference = None if found.difference is None else found.difference._asdict()
        print(json.dumps({**found._asdict(), "difference": difference}, indent=2))
    elif not options.quiet:
        if found.difference is not None:
            print(found.difference)
        else:
            print(f"the same: {found.matrices} matrices of experts and {found.tensors} other tensors")
        if found.not_compared:
            examples = ", ".join(found.not_compared[:3])
            print(
                f"not compared, since only one of the two has that name: {len(found.not_compared)}, such as {examples}"
            )
    return status
