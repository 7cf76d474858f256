"""The peers' single functions are loaded as in tests/peers."""

from __future__ import annotations

import sys
from pathlib import Path

PEERS = str(Path(__file__).resolve().parent.parent / "peers")
if PEERS not in sys.path:
    sys.path.insert(0, PEERS)
