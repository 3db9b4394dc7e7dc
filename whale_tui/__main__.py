"""The program: `whale-tui`, and `python -m whale_tui`."""

from __future__ import annotations

import sys

from whale_tui import opening


def main() -> None:
    """Opening the screen needs no parser; everything else goes through the command line."""
    act = opening.straight(sys.argv[1:])
    if act is not None:
        sys.exit(opening.guarded(act))
    from whale_tui import cli

    cli.main()


if __name__ == "__main__":
    main()
