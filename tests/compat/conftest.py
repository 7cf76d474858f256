"""Beside the tests here lies a plain module; the peers' single functions are loaded as in tests/peers."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent / "peers")):
    if folder not in sys.path:
        sys.path.insert(0, folder)
