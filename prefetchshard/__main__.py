"""`python -m prefetchshard`."""

from __future__ import annotations

import sys

from prefetchshard.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
