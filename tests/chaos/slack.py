"""How patient the chaos run is."""

from __future__ import annotations

import os

#: A busy machine may take so many times longer than the promise before a test fails; the table shows what it took.
SLACK = float(os.environ.get("WSYNC_CHAOS_SLACK", "1.0"))


#: Takes only every n-th point of a sweep, for a quick look.
STRIDE = int(os.environ.get("WSYNC_CHAOS_STRIDE", "1"))
