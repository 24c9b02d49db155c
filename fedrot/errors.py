"""Errors that fedrot raises on purpose; every message says what was wrong, where, and what to do."""


class FedrotError(ValueError):
    """Base class of all errors raised by fedrot."""


class SymmetryError(FedrotError):
    """The architecture is unknown, or the tensors are not those its family describes."""


class UpdateError(FedrotError):
    """A client update cannot be used: a tensor is missing, extra, misshapen or not finite."""
