"""The exception tree: whose fault it is, and what the caller may do about it.

Foreign exceptions are mapped to these at the edge file that meets them. Each class has a `code`, the name it travels
under in an error reply, so that the caller of a remote operation sees the same class as a local one.
"""


class TensorcastError(Exception):
    """Base of all errors of this package."""

    code = "internal"


class ConfigError(TensorcastError):
    """The user's configuration is wrong. The message names the field, the value and the remedy. Never retried."""

    code = "config"


class InvalidArgument(TensorcastError):
    """The caller asked for what cannot be. The message names the tensor, name or step. Never retried."""

    code = "invalid"


class Unauthorized(TensorcastError):
    """The token or the certificate is missing or wrong, or does not allow this. Nothing was done, and nothing was told."""

    code = "unauthorized"


class ProtocolError(TensorcastError):
    """Bytes or messages that break the protocol. The connection they came from is closed."""

    code = "protocol"


class WrongRole(TensorcastError):
    """This worker does not do that for callers: it has not the role. The message names one that has, if any is listed."""

    code = "wrong-role"


class Unavailable(TensorcastError):
    """The other side cannot be reached or went away. Retry later; nothing is known to have happened."""

    code = "unavailable"


class DeadlineExceeded(Unavailable):
    """No answer within the caller's deadline. The operation may still happen on the other side."""

    code = "deadline"


class Cancelled(TensorcastError):
    """Its caller did not want it any more. What was done stays done."""

    code = "cancelled"


class NotFound(TensorcastError):
    """What was named does not exist (any more)."""

    code = "not-found"


class Compacted(NotFound):
    """The history of changes does not reach back that far: list everything again."""

    code = "compacted"


class Conflict(TensorcastError):
    """A compare-and-swap or a put-if-absent lost; read again before retrying."""

    code = "conflict"


class Exhausted(TensorcastError):
    """A limit of config.py is reached: memory, queue. Retry after something was released."""

    code = "exhausted"


def _tree(root: type[TensorcastError]) -> list[type[TensorcastError]]:
    return [root, *(each for child in root.__subclasses__() for each in _tree(child))]


def error_from_code(code: str, message: str) -> TensorcastError:
    """The exception that travelled as (code, message); an unknown code of a newer peer is a plain TensorcastError."""
    for kind in _tree(TensorcastError):
        if kind.code == code:
            return kind(message)
    return TensorcastError(f"{code}: {message}")
