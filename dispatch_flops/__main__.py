"""``python -m dispatch_flops``: the command line."""

from __future__ import annotations

import sys

from dispatch_flops.cli import main

if __name__ == "__main__":
    sys.exit(main())
