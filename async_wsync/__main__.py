"""``python -m async_wsync`` is the ``async-wsync`` command."""

from __future__ import annotations

import sys

from async_wsync.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
