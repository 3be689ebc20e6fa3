"""Exit codes of the command line; ``dispatch-flops --help`` explains them."""

from __future__ import annotations

OK = 0
CHECK_FAILED = 1
ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
