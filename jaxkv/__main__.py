"""`jaxkv` and `python -m jaxkv`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its code."""
    from jaxkv.cli.app import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
