"""The contract: a call goes in, a result comes out.

The same words and the same JSON stand in HTTP, in Redis, in the client and in the metrics. All models are
frozen and refuse unknown fields, so a misspelt limit is an error and never a default.
"""

from __future__ import annotations

import re
from base64 import b64decode
from enum import StrEnum
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import (
    AfterValidator,
    Base64Encoder,
    BaseModel,
    ConfigDict,
    EncodedBytes,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from sandbox.errors import InternalError, InvalidCall, QueueTimeout, SandboxError

MIB = 1024 * 1024

#: The longest that one question for a job's result waits: below the minute after which proxies cut what is silent.
MAX_WAIT_S = 50.0


class CallStatus(StrEnum):
    """What came of a call. A closed list in two families, told apart by `is_fault`.

    Verdicts are about the program. Faults are about us, and are never a reward signal.
    """

    OK = "ok"  # exit code 0
    ERROR = "error"  # exit code not 0
    SIGNALED = "signaled"  # ended by a signal that was not ours
    TIMEOUT = "timeout"  # wall or CPU limit
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    QUEUE_TIMEOUT = "queue_timeout"  # fault: it waited too long for its deadline; safe to send again
    INTERNAL_ERROR = "internal_error"  # fault: we failed

    @property
    def is_fault(self) -> bool:
        """True when the status says nothing about the program."""
        return self in {CallStatus.QUEUE_TIMEOUT, CallStatus.INTERNAL_ERROR}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Frozen):
    """Bounds on one call. A value above the server's ceiling is refused, not clamped."""

    wall_s: float = Field(
        default=10.0, gt=0, le=86_400, description="Wall-clock seconds from the start of the program."
    )
    cpu_s: float = Field(
        default=10.0, gt=0, le=86_400, description="CPU seconds of the program and all its children together."
    )
    memory_bytes: int = Field(
        default=512 * MIB,
        ge=16 * MIB,
        le=1 << 40,
        description="Memory of all processes and scratch files together.",
    )
    output_bytes: int = Field(
        default=64 * 1024,
        ge=0,
        le=64 * MIB,
        description="Bytes kept of stdout, and again of stderr; one more byte ends the program.",
    )
    processes: int = Field(default=64, ge=1, le=4096, description="Processes and threads alive at one time.")


#: What a program may do with sockets: nothing but pairs, or talk to itself.
Network = Literal["none", "loopback"]


class Usage(_Frozen):
    """What a call consumed, from the kernel and our own clocks, never from the program."""

    wall_s: float = Field(default=0.0, ge=0, description="Seconds from fork to end.")
    cpu_s: float = Field(default=0.0, ge=0, description="User and system seconds of all its processes.")
    memory_peak_bytes: int = Field(
        default=0,
        ge=0,
        description="Highest memory at one time; 0 if it never ran, or where the host does not tell.",
    )
    queue_s: float = Field(default=0.0, ge=0, description="Seconds between acceptance and start.")


class _StrictBase64(Base64Encoder):
    """Refuses what is no base64; pydantic's own skips it, and the program would read other bytes than were sent."""

    @classmethod
    def decode(cls, data: bytes) -> bytes:
        """Line breaks are allowed, as many encoders make them."""
        try:
            return b64decode(data.translate(None, b"\r\n"), validate=True)
        except ValueError as exc:
            raise PydanticCustomError("base64_decode", "Input should be base64") from exc


class Base64File(_Frozen):
    """Content of a file that is not text."""

    base64: Annotated[bytes, EncodedBytes(encoder=_StrictBase64)]


def _check_file_name(name: str) -> str:
    """A relative path without '..', without empty parts, that any file system takes, beside the program's own."""
    if name == "main.py":
        raise ValueError("is the program's own file; give that as `code`")
    parts = name.split("/")
    if any(part in {"", ".", ".."} or len(part.encode()) > 255 or "\0" in part for part in parts):
        raise ValueError("must be a relative path without '.', '..' or empty parts")
    return name


FileName = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_check_file_name)]
#: A constraint makes pydantic look at the characters, so that a lone surrogate, which UTF-8 cannot carry, is refused.
Text = Annotated[str, StringConstraints(min_length=0)]
_CALL_ID = r"^[A-Za-z0-9._:/-]{1,128}$"
CallId = Annotated[str, StringConstraints(pattern=_CALL_ID)]


def is_call_id(text: str) -> bool:
    """Whether a call can have this id."""
    return re.fullmatch(_CALL_ID, text) is not None


class ToolCall(_Frozen):
    """One program to run. Only `code` is required."""

    id: CallId = Field(
        default_factory=lambda: uuid4().hex, description="Names the call; also its idempotency key."
    )
    code: Text = Field(description="Python source, run as `__main__`.")
    stdin: Text = Field(default="", description="Given to the program as UTF-8, then end of file.")
    files: dict[FileName, Text | Base64File] = Field(
        default_factory=dict,
        max_length=256,
        description="Files that lie in the working directory at the start.",
    )
    fetch_files: list[FileName] = Field(
        default_factory=list,
        max_length=64,
        description="Files that are wanted of a program that comes to its end by itself.",
    )
    limits: Limits = Field(default_factory=Limits)
    deadline_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Seconds from acceptance until the answer is due. What is left of it bounds the program's time; "
        "a call that had to wait too long is a `queue_timeout`.",
    )
    priority: Literal["tool", "judge"] = Field(
        default="tool", description="`tool` (a model waits) goes before `judge` (a reward is computed)."
    )
    network: Network = Field(
        default="none",
        description="`loopback`: sockets that reach the call's own processes only, where the service allows them.",
    )
    echo_last_value: bool = Field(
        default=False, description="Print the value of an expression on the last line, as a notebook does."
    )
    keep_bytes: int | None = Field(
        default=None,
        ge=0,
        le=64 * MIB,
        description="Keep at most so much of each stream, its head and its tail by halves; the program may write on "
        "up to `limits.output_bytes`. Without it all is kept.",
    )
    hash_seed: Literal[0] | None = Field(
        default=None,
        description="0: hashes of text are the same in every run, as with PYTHONHASHSEED=0; else they differ.",
    )
    random_seed: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 32,
        description="Seeds `random`, and the global generators of numpy and sympy where the program imports them, in "
        "its first process.",
    )

    def is_again(self, other: ToolCall) -> bool:
        """Whether this is the same call sent again. Only how soon its answer is due may have changed."""
        return self == other.model_copy(update={"deadline_s": self.deadline_s, "priority": self.priority})

    @field_validator("files")
    @classmethod
    def _no_file_is_a_folder(cls, files: dict[str, str | Base64File]) -> dict[str, str | Base64File]:
        taken = {"main.py", *files}
        for name in files:
            folder = name
            while folder := folder.rpartition("/")[0]:
                if folder in taken:
                    raise ValueError(f"{folder[:200]!r} cannot be a file and a folder")
        return files


class ProgramException(_Frozen):
    """The exception that ended a program, in the program's own word: unlike its status, a program can forge it."""

    type: str = Field(
        description="Its name as a traceback has it, with its module where it has one of a library."
    )
    message: str = Field(description="`str()` of it, cut to 1,000 characters.")
    line: int | None = Field(
        default=None, description="The last line of the program's own text that it came by."
    )
    source: str | None = Field(default=None, description="That line's text, cut to 500 characters.")


class ToolResult(_Frozen):
    """What came of one call."""

    id: CallId
    status: CallStatus
    exit_code: int | None = Field(default=None, description="Set when the program ended by itself.")
    signal: int | None = Field(default=None, description="Set when a signal ended the program.")
    stdout: str = ""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    stdout_tail: str = Field(
        default="", description="The end of a stdout of which `keep_bytes` left the middle out."
    )
    stderr_tail: str = ""
    stdout_bytes: int = Field(default=0, ge=0, description="What the program wrote, as far as it was let.")
    stderr_bytes: int = Field(default=0, ge=0)
    exception: ProgramException | None = Field(
        default=None, description="What ended a Python program with `error`: the program's own word."
    )
    files: dict[str, Base64File | None] = Field(
        default_factory=dict,
        description="Those of `fetch_files` that are there, in the program's own word; null for one that is beyond "
        "1 MiB together with those before it.",
    )
    usage: Usage = Field(default_factory=Usage)
    worker: str = Field(default="", description="The worker that ran the call.")
    reason: str | None = Field(default=None, description="For a fault: what failed, in one sentence.")

    def to_error(self) -> SandboxError | None:
        """What a fault is where an answer has no place for it; None for a verdict."""
        if self.status is CallStatus.QUEUE_TIMEOUT:
            return QueueTimeout(self.reason or "the deadline passed before the program started")
        if self.status is CallStatus.INTERNAL_ERROR:
            return InternalError(self.reason or "the service failed while it ran the call")
        return None


def parse_call(raw: bytes | str | dict[str, JsonValue]) -> ToolCall:
    """Read a call from JSON, or from an object already read from JSON.

    Raises InvalidCall, whose message names the first wrong field and the rule it breaks.
    """
    try:
        if isinstance(raw, dict):
            return ToolCall.model_validate(raw)
        return ToolCall.model_validate_json(raw)
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


def first_error(exc: ValidationError) -> str:
    """The first complaint of a validation as 'field.path: rule', without quoting the input's values.

    A name that we do not know goes before the field that is missing because of it.
    """
    # Listing all, the one way there is, takes 3 µs each, and a body can hold a million.
    if exc.error_count() > 1000:
        return f"body: {exc.error_count()} errors, too many to name one"
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    error = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in error["loc"])[:200]  # a field's name may be input too
    return f"{field or 'body'}: {error['msg']}"
