"""What the API server answers when it does not do what it was asked, named for what follows from it."""

from drover.errors import DroverError


class RefusedError(DroverError):
    """It will not have an object: asking again changes nothing, the spec or the namespace must change."""


class ExistsError(DroverError):
    """There is an object already where one was to be made."""


class UnavailableError(DroverError):
    """It did not answer, or asks for patience: the same request may succeed later."""
