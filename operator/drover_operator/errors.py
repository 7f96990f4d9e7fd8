"""What the API server answers when it does not do what it was asked, named for what follows from it."""

from drover.errors import DroverError


class RefusedError(DroverError):
    """It will not have an object: asking again changes nothing, the spec or the namespace must change."""


class UnavailableError(DroverError):
    """It did not answer, or asks for patience: the same request may succeed later."""
