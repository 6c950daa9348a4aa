"""The command line, `hf-mxfp4`: one module a command, each with `add_arguments` and `run`.

Exit status: 0, all well; 1, a check failed; 2, bad input, with one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO

from huggingface_hub.errors import StrictDataclassError

from .. import __version__
from . import bench, convert, demo, doctor, inspect, tune, verify

COMMANDS = {
    "bench": bench,
    "convert": convert,
    "demo": demo,
    "doctor": doctor,
    "inspect": inspect,
    "tune": tune,
    "verify": verify,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: without the program's name; by default the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="hf-mxfp4", description="Packed MXFP4 experts for Transformers models.")
    parser.add_argument("--version", action="version", version=f"hf_mxfp4 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        if "--quiet" not in command.format_help():
            command.add_argument("--quiet", action="store_true", help="no output beside the exit status")
            command.set_defaults(silent=True)
    options = parser.parse_args(arguments)
    silent = options.quiet and getattr(options, "silent", False)
    try:
        with redirect_stdout(StringIO()) if silent else nullcontext():
            status: int = COMMANDS[options.command].run(options)
    except (OSError, ValueError, RuntimeError, TypeError, StrictDataclassError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"hf-mxfp4 {options.command}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
