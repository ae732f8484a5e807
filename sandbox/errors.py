"""Every exception of the service, in one tree.

    SandboxError
    ├── InvalidCall       422  the caller's mistake: a bad field, a limit above the server's ceiling
    │   └── BadToolCall    -   a model's mistake: no such tool, or arguments that are none of it; the model may see it
    ├── Unauthorized      401  no API key, or one that is not known
    ├── Forbidden         403  a key that is not good for this
    ├── NotFound          404  no such call, or its result is forgotten
    ├── Cancelled         409  somebody asked for the end of this call
    ├── CallTooLarge      413  the request is over the bound on bodies
    ├── Overloaded        429  full; retry after `retry_after_s`
    ├── Unavailable       503  no Redis, no worker, draining, unreachable; retry
    │   └── AnswerLost     -   inside a client: the connection broke after the call was sent; it may have run; retry
    ├── QueueTimeout      504  the deadline passed before the program started; safe to send again
    ├── InternalError     500  we failed while running the call; never a verdict on the program
    ├── JailError          -   inside a worker: a jail would not start or broke; the call becomes a fault
    └── ConfigError        -   the start is refused

A program that fails is not here: that is data, a `ToolResult` with a `CallStatus`. The gateway turns an
exception into `{"error": {"name", "message", "retry_after_s"?}}` with the status above, and the client turns
that back into the same class (`from_wire`).
"""

from __future__ import annotations

from typing import ClassVar


class SandboxError(Exception):
    """Base of all errors of the service."""

    http_status: ClassVar[int] = 500
    #: True when sending the same call again, under the same id, can help and can do no harm.
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def to_wire(self) -> dict[str, dict[str, str | float]]:
        """The JSON body of an error answer."""
        body: dict[str, str | float] = {"name": type(self).__name__, "message": self.message}
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        return {"error": body}


class InvalidCall(SandboxError):
    """The call itself is wrong; sending it again cannot help."""

    http_status = 422


class BadToolCall(InvalidCall):
    """A model asked for a tool that there is not, or with the wrong arguments. The message is for the model."""


class Unauthorized(SandboxError):
    """The request has no API key, or one that the gateway does not know."""

    http_status = 401


class Forbidden(SandboxError):
    """The request's API key lacks the scope that this takes."""

    http_status = 403


class NotFound(SandboxError):
    """Nobody knows it, or not any more."""

    http_status = 404


class CallTooLarge(SandboxError):
    """The request is larger than the gateway reads."""

    http_status = 413


class Overloaded(SandboxError):
    """A bound of the gateway is reached: on calls or bytes in flight, or on those of one tenant."""

    http_status = 429
    is_retryable = True


class Cancelled(SandboxError):
    """Somebody asked for the end of this call, and got it. The program may have begun."""

    http_status = 409


class Unavailable(SandboxError):
    """Nobody could take the call: no Redis, no worker, a draining or unreachable gateway."""

    http_status = 503
    is_retryable = True


class AnswerLost(Unavailable):
    """The connection broke after the call was sent, so the program may have run.

    Sent again under the same id, the call joins the first run, or gets its result if that is not long ago.
    """


class QueueTimeout(SandboxError):
    """The call's deadline passed before it started."""

    http_status = 504
    is_retryable = True


class InternalError(SandboxError):
    """The service failed while it ran the call. The program may have run."""

    http_status = 500


class JailError(SandboxError):
    """A jail would not start, or its forkserver broke."""


class ConfigError(SandboxError):
    """A setting or the host makes a start impossible; the message names the remedy."""


_ON_THE_WIRE: dict[str, type[SandboxError]] = {
    cls.__name__: cls
    for cls in (
        InvalidCall,
        Unauthorized,
        Forbidden,
        NotFound,
        Cancelled,
        CallTooLarge,
        Overloaded,
        Unavailable,
        QueueTimeout,
        InternalError,
    )
}


def from_wire(name: str, message: str, retry_after_s: float | None = None) -> SandboxError:
    """The exception that the gateway raised; an unknown name becomes an `InternalError` that quotes it."""
    cls = _ON_THE_WIRE.get(name)
    if cls is None:
        return InternalError(f"{name}: {message}")
    return cls(message, retry_after_s=retry_after_s)
