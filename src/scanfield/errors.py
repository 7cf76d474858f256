"""The errors of scanfield: one family, each also the builtin that a caller expects.

A message names the argument, says what came and what is allowed and, where there is one, the line that mends it.
"""

__all__ = [
    "ArgumentError",
    "BackendError",
    "DeviceError",
    "DtypeError",
    "ScanfieldError",
    "ShapeError",
    "StateError",
]


class ScanfieldError(Exception):
    """Base of every error that scanfield raises on purpose."""


class ShapeError(ScanfieldError, ValueError):
    """An array has the wrong rank or size, or two arrays disagree."""


class DtypeError(ScanfieldError, TypeError):
    """An array has a dtype that the operation does not take."""


class BackendError(ScanfieldError, TypeError):
    """Arrays of two libraries, an unknown kind of array, or an implementation that cannot serve the call."""


class DeviceError(ScanfieldError, ValueError):
    """Arrays that live on two devices."""


class ArgumentError(ScanfieldError, TypeError):
    """An unknown keyword, a missing argument or an option outside its range."""


class StateError(ScanfieldError, RuntimeError):
    """A call out of order: backward before forward, changed parameters, a foreign checkpoint."""
