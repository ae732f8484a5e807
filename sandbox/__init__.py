"""RoC Sandbox: runs the Python that language models write, for reinforcement learning.

from sandbox import SandboxClient, ToolCall
"""

from sandbox.calls import Base64File, CallStatus, Limits, ToolCall, ToolResult, Usage
from sandbox.client import BlockingClient, SandboxClient
from sandbox.errors import (
    AnswerLost,
    BadToolCall,
    CallTooLarge,
    Cancelled,
    ConfigError,
    Forbidden,
    InternalError,
    InvalidCall,
    JailError,
    NotFound,
    Overloaded,
    QueueTimeout,
    SandboxError,
    Unauthorized,
    Unavailable,
)
from sandbox.grade import BlockingGrader, Grader
from sandbox.grading.math import MathGrade, MathTask
from sandbox.wire import Answer

__all__ = [
    "Answer",
    "AnswerLost",
    "BadToolCall",
    "Base64File",
    "BlockingClient",
    "BlockingGrader",
    "CallStatus",
    "CallTooLarge",
    "Cancelled",
    "ConfigError",
    "Forbidden",
    "Grader",
    "InternalError",
    "InvalidCall",
    "JailError",
    "Limits",
    "MathGrade",
    "MathTask",
    "NotFound",
    "Overloaded",
    "QueueTimeout",
    "SandboxClient",
    "SandboxError",
    "ToolCall",
    "ToolResult",
    "Unauthorized",
    "Unavailable",
    "Usage",
]
