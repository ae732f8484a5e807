"""RoC Sandbox: runs the Python that language models write, for reinforcement learning.

from sandbox import SandboxClient, ToolCall
"""

from sandbox.calls import Base64File, CallStatus, Limits, ToolCall, ToolResult, Usage
from sandbox.client import BlockingClient, SandboxClient
from sandbox.errors import (
    AnswerLost,
    CallTooLarge,
    Cancelled,
    ConfigError,
    InternalError,
    InvalidCall,
    JailError,
    Overloaded,
    QueueTimeout,
    SandboxError,
    Unavailable,
)
from sandbox.wire import Answer

__all__ = [
    "Answer",
    "AnswerLost",
    "Base64File",
    "BlockingClient",
    "CallStatus",
    "CallTooLarge",
    "Cancelled",
    "ConfigError",
    "InternalError",
    "InvalidCall",
    "JailError",
    "Limits",
    "Overloaded",
    "QueueTimeout",
    "SandboxClient",
    "SandboxError",
    "ToolCall",
    "ToolResult",
    "Unavailable",
    "Usage",
]
