"""Errors a user can act on.

Every message says what was expected, what came, which case, and what to do.
"""


class TeslaMedError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(TeslaMedError):
    """A configuration file, an override or a command-line value is wrong."""


class DataError(TeslaMedError):
    """An input file or folder cannot be used."""


class GeometryError(DataError):
    """Two grids that must agree do not, or a grid cannot be used."""


class CheckpointError(TeslaMedError):
    """Weights cannot be read or do not fit the model."""


class AdaptationError(TeslaMedError):
    """A method cannot adapt this model or this case."""


class OutputError(TeslaMedError):
    """The output folder cannot be used: it exists, is locked or cannot be written."""
