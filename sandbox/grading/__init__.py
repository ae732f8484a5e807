"""Whether an answer is right: programs against test cases (`judge`), mathematics against a reference (`math`).

A grader is made of calls, and does not care who runs them: it is handed a `Run`. The gateway hands it its own way
into the queue (`POST /v1/judge`, `POST /v1/grade/math`), and `sandbox.grade` the client's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sandbox.calls import ToolCall, ToolResult

#: Runs a call. What it answers may be a fault; what it raises is a SandboxError. Cancelled, it ends the call.
Run = Callable[[ToolCall], Awaitable[ToolResult]]
