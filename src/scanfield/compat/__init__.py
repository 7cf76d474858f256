"""Other projects' functions on scanfield: ``compat.mamba_ssm``, with causal_conv1d's, and ``compat.fla``.

Code that is written for those packages runs unchanged where they are missing, once ``compat.install`` has put
importable stand-ins in their places.
"""

from scanfield.compat import fla, mamba_ssm
from scanfield.compat._install import Installation, install

__all__ = ["Installation", "fla", "install", "mamba_ssm"]
