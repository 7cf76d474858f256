"""A small call of every operation: its arrays, its options, and one token of it for `step`."""

from __future__ import annotations

import sys
from pathlib import Path

# The standard draws of the field tests serve here too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "field"))

from operations import every_operation, token

EXAMPLES = {
    operation: (inputs, options, token(inputs, 0))
    for operation, (inputs, options, _) in every_operation(70, 1, 4, 2, 3, 2, channels=3, state=2).items()
}
