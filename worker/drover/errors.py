"""Every exception Drover raises on purpose, named for whose fault it is.

A message says what, where and what to do; the commands print it as one line, without a traceback.
"""


class DroverError(Exception):
    """Base of all errors below: its text is meant for the user."""


class LocalProtocolError(DroverError):
    """We were about to break the rules of the RPC protocol."""


class RemoteProtocolError(DroverError):
    """The peer broke the rules of the RPC protocol; only its connection pays for it."""


class VersionError(RemoteProtocolError):
    """The peer speaks another version of the protocol."""


class LimitError(RemoteProtocolError):
    """A client asked for more than one client may have."""


class WorkerError(DroverError):
    """A worker cannot be reached, refused us or went away."""


class IncompatibleWorkerError(WorkerError):
    """What answers at a worker's address is no worker that we can use: trying again would change nothing."""


class DeviceError(DroverError):
    """A device cannot do what was asked: unknown, out of memory, an operation it lacks."""


class GraphError(DroverError):
    """An operation's operands do not fit together: types, shapes, strides or index values."""


class ModelError(DroverError):
    """A model file is missing, damaged or of a kind we do not support."""


class ArchitectureError(ModelError):
    """A model file is sound, and of an architecture that we do not support."""

    def __init__(self, message: str, architecture: str) -> None:
        super().__init__(message)
        self.architecture = architecture


class ChecksumError(ModelError):
    """A model file is not the one that was asked for."""


class ModelChangedError(ModelError):
    """A model file was changed while it was being read: what was read may be of two files."""


class ModelReplacedError(ModelError):
    """A model file is another one than the one that was proven."""


class FetchError(DroverError):
    """A model cannot be fetched; `reason` is one word for machines, `transient` whether it may work later."""

    def __init__(self, message: str, reason: str, transient: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.transient = transient


class PlanError(DroverError):
    """Layers cannot be laid over the devices as asked."""


class ShortageError(PlanError):
    """The devices have too little memory for the model."""


class ResultError(DroverError):
    """Workers computed what cannot be right."""


class RequestError(DroverError):
    """An API request is malformed or asks for what this model cannot do; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SpecError(DroverError):
    """An InferenceCluster file is not valid; the text names the field and the line."""
