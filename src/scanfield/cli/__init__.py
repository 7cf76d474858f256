"""The command line: `scanfield info | check | bench | helmholtz | demo`, also as `python -m scanfield`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from scanfield.cli import streams
from scanfield.errors import ScanfieldError

__all__ = ["main"]


@streams.present()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is 0 all well, 1 something is apart or missing, 2 a wrong call."""
    parser, commands = parsers()
    arguments, others = parser.parse_known_args(argv)
    if others:  # told with the usage of the command that did not take them
        commands.get(arguments.command, parser).error(f"unrecognized arguments: {' '.join(others)}")
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = arguments.run(arguments)
    except ScanfieldError as error:
        print(f"scanfield {arguments.command}: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"scanfield {arguments.command}: not enough memory ({error})", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has gone. Point stdout elsewhere, or the interpreter complains while it shuts
        # down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"scanfield {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # what there was to keep is kept
        print(f"scanfield {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return status


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line, and those of its commands by name."""
    # Parsing imports the commands' modules, and these only what they need to describe themselves.
    import scanfield
    from scanfield.cli import bench, check, demo, helmholtz, info

    parser = argparse.ArgumentParser(
        prog="scanfield",
        description="Scans, their gradients and Helmholtz networks on arrays of any library.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"scanfield {scanfield.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (info, check, bench, helmholtz, demo):
        command.add_parser(commands)
    return parser, dict(commands.choices)


_EXAMPLES = """\
examples:
  scanfield info                    what is here, and which implementation runs what
  scanfield check                   do all implementations agree on this machine?
  scanfield bench gdn2 --size key=128 --size value=128
  scanfield helmholtz square-1-4 --plot field.png
  scanfield COMMAND --help          more examples of each
"""
