"""Our errors as JSON-RPC has them: a code, a message, and data that says whether to send the request again."""

from __future__ import annotations

from typing import NamedTuple

from sandbox.errors import CallTooLarge, Cancelled, InvalidCall, NotFound, SandboxError

#: The protocol's own: the caller's mistake, and ours.
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
#: Of those that are left to a server: nothing was run, send it again after `data.retry_after_s`.
SEND_AGAIN = -32090
#: As the Language Server Protocol has it, which MCP's SDK follows.
REQUEST_CANCELLED = -32800


class RpcError(NamedTuple):
    """The `error` of an answer."""

    code: int
    message: str
    data: dict[str, str | float | bool]


def to_rpc_error(exc: SandboxError) -> RpcError:
    """The same error in JSON-RPC's words."""
    data = {**exc.to_wire()["error"], "is_retryable": exc.is_retryable}
    return RpcError(_code(exc), exc.message, data)


def _code(exc: SandboxError) -> int:
    if exc.is_retryable:
        return SEND_AGAIN
    if isinstance(exc, Cancelled):
        return REQUEST_CANCELLED
    return INVALID_PARAMS if isinstance(exc, InvalidCall | CallTooLarge | NotFound) else INTERNAL_ERROR
