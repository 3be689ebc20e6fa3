"""Run the command line: ``python -m dispatch_flops``."""

from __future__ import annotations

import sys

from dispatch_flops.cli import main

if __name__ == "__main__":
    sys.exit(main())
