"""The environment server of OpenEnv 0.10, serving a coding environment: code goes in, what it printed comes out.

A client opens the websocket `/openenv/ws` and keeps it for a session of many episodes; each of its messages has one
answer. An error is never an observation: the client raises it, and the session goes on.

    {"type": "reset", "data": {"seed"?, "episode_id"?}}    -> {"type": "observation", "data": ...}
    {"type": "step", "data": {"code", "stdin"?, "timeout_s"?}}                 -> the same
    {"type": "state"}                                      -> {"type": "state", "data": ...}
    {"type": "close"}                                      -> the end
    what was wrong                                         -> {"type": "error", "data": {"message", "code", ...}}

An observation is `{"observation": {"stdout", "stderr", "exit_code", "metadata"}, "reward": null, "done": false,
"metadata"}`. Those fields are coding_env's, whose client refuses others; what we know beyond them is its metadata.

Who is there. Each session is a task of the server, and what it holds is a few numbers: its programs run anywhere and
leave nothing behind, so there may be thousands, and an idle one costs no slot. A step takes a permit of its own. Who
goes away during a step cancels it. At the end of the process uvicorn closes what is still open, with 1012, after
open steps were answered.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import Receive, Scope, Send

from gateway.engine import MOST_PARTS, Answer, Door, Engine, EngineRoute, Exchange, Page
from gateway.reader import has_more_parts, read_json
from gateway.routes import retry_after
from gateway.tenants import Tenant, tenant_of
from sandbox.calls import Limits, Text, ToolCall, ToolResult, first_error
from sandbox.errors import Forbidden, InvalidCall, Overloaded, SandboxError, Unavailable
from sandbox.tools import render

#: Sessions of one gateway process; an open one is 35 KiB, by the gateway's memory with 2,000 of them.
MOST_SESSIONS = 4096
#: A trainer may compute for long between two steps; its session costs little. Clients connect again by themselves.
IDLE_S = 3600.0
#: Messages that are heard before the one in front of them is answered; more wait in the connection.
MOST_AHEAD = 16
#: Clients give up after 60 s unless told otherwise; before that they shall know what has happened.
DEADLINE_S = 55.0

Code = Literal[
    "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR", "CAPACITY_REACHED", "SESSION_ERROR"
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Action(_Strict):
    """A program to run."""

    code: Text = Field(description="Python; the value of an expression on its last line is printed.")
    stdin: Text = ""
    timeout_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Wall-clock and CPU seconds; 10."
    )
    metadata: dict[str, JsonValue] = Field(default_factory=dict, description="Nothing looks at it.")


class Observation(_Strict):
    """What came of a program."""

    done: bool = False
    reward: float | None = None
    stdout: str = ""
    stderr: str = ""
    exit_code: int = Field(default=0, description="Below 0: the signal that ended it; our limits are 9.")
    metadata: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="`status` (a verdict of ours), `text` (for the model), `wall_s`, `cpu_s`, `truncated`.",
    )


class State(_Strict):
    """Where a session is."""

    episode_id: str | None = None
    step_count: int = 0
    last_exit_code: int = 0


class Reset(BaseModel):
    """What an episode begins with. Names that an environment does not know are ignored, as OpenEnv does."""

    seed: int | None = Field(
        default=None, ge=0, lt=1 << 32, description="`random_seed` of each of its programs."
    )
    episode_id: Annotated[str, Field(max_length=255)] | None = None


class Step(BaseModel):
    """A step by HTTP, without a session."""

    action: Action
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)


class _Message(_Strict):
    type: Literal["reset", "step", "state", "close"]


class _ResetMessage(_Message):
    data: Reset = Field(default_factory=Reset)


class _StepMessage(_Message):
    data: Action


_MESSAGES: dict[str, TypeAdapter[Any]] = {
    "reset": TypeAdapter(_ResetMessage),
    "step": TypeAdapter(_StepMessage),
    "state": TypeAdapter(_Message),
    "close": TypeAdapter(_Message),
}


def doors(engine: Engine) -> Sequence[Door]:
    """Everything below `/openenv/`, which is a client's `base_url`. Whether it is healthy needs no key."""
    routes = [
        WebSocketRoute("/ws", Sessions(engine)),
        Route("/reset", EngineRoute(engine, _reset, _refuse), methods=["POST"]),
        Route("/step", EngineRoute(engine, _step, _refuse), methods=["POST"]),
        Route("/state", Page(lambda _: Answer(State().model_dump_json().encode()))),
        Route("/metadata", Page(_metadata)),
        Route("/schema", Page(_schema)),
    ]
    healthy = Page(lambda _: _health(engine))
    return [
        Door("/openenv/health", healthy, ("GET",), None),
        Door("/openenv/", Router(routes, redirect_slashes=False)),
    ]


# ---- sessions ----


class Sessions:
    """The websockets of one gateway."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one until either side ends it. Raises Forbidden and Unavailable, then it was not let in."""
        _refuse_pages(scope)
        if self._engine.gateway.draining:
            raise Unavailable("this gateway is shutting down")
        await receive()
        await send({"type": "websocket.accept"})
        tenant = tenant_of(scope)
        try:
            with self._place(tenant):
                _refuse_attaching(scope)
                await _Session(self._engine, tenant).serve(receive, send)
        except SandboxError as exc:
            code: Code = "CAPACITY_REACHED" if isinstance(exc, Overloaded) else "SESSION_ERROR"
            await send({"type": "websocket.send", "text": _error(code, exc.message)})
            await send({"type": "websocket.close"})

    @contextmanager
    def _place(self, tenant: Tenant) -> Iterator[None]:
        """Raises Overloaded. A tenant has as many sessions as it may have calls in flight."""
        most = min(MOST_SESSIONS, tenant.max_in_flight or MOST_SESSIONS)
        if self._open.total() >= MOST_SESSIONS or self._open[tenant.name] >= most:
            raise Overloaded(
                f"all {most} sessions of this gateway are open; close one, or connect to another"
            )
        self._open[tenant.name] += 1
        try:
            yield
        finally:
            self._open[tenant.name] -= 1


class _Session:
    """One episode after the other."""

    def __init__(self, engine: Engine, tenant: Tenant) -> None:
        self._engine = engine
        self._tenant = tenant
        self._seed: int | None = None
        self._state = State()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Answer messages in their order until the end of the session."""
        caller = _Caller(receive)
        answering: asyncio.Future[str | None] | None = None
        try:
            while (raw := await caller.message()) is not None:
                answering = asyncio.ensure_future(self._answer(raw))
                await caller.stays_until(answering)
                if not answering.done():
                    return
                answer = answering.result()
                if answer is None:
                    await send({"type": "websocket.close"})
                    return
                await send({"type": "websocket.send", "text": answer})
        except TimeoutError:
            await send({"type": "websocket.close", "code": 1001, "reason": f"idle for {IDLE_S:g} s"})
        finally:
            left = {task for task in (caller.hearing, answering) if task is not None}
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    async def _answer(self, raw: str | bytes) -> str | None:
        """What a message is answered; None is the end."""
        try:
            message = _read(raw)
            match message:
                case _ResetMessage():
                    return _observation_message(self._reset(message.data))
                case _StepMessage():
                    return _observation_message(await self._step(message.data))
            return None if message.type == "close" else _message("state", self._state.model_dump())
        except _WrongMessage as exc:
            return _error(exc.code, exc.message)
        except InvalidCall as exc:
            return _error("VALIDATION_ERROR", exc.message)
        except SandboxError as exc:
            code: Code = "CAPACITY_REACHED" if isinstance(exc, Overloaded) else "EXECUTION_ERROR"
            about: dict[str, JsonValue] = {"name": type(exc).__name__, "retryable": exc.is_retryable}
            if exc.retry_after_s is not None:
                about["retry_after_s"] = exc.retry_after_s
            return _error(code, exc.message, **about)

    def _reset(self, asked: Reset) -> Observation:
        self._seed = asked.seed
        self._state = State(episode_id=asked.episode_id or str(uuid4()))
        return Observation()

    async def _step(self, action: Action) -> Observation:
        """Run a program. One that did not come to a verdict is no step."""
        with self._engine.gateway.admission.enter(self._tenant):  # its bytes are counted where they came in
            observation = _observation(
                await self._engine.run(_call(action, self._engine, self._seed), self._tenant)
            )
        self._state.step_count += 1
        self._state.last_exit_code = observation.exit_code
        return observation


class _Caller:
    """Whoever is at the other end: listened to also while an answer is due, so that its going away is heard of."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._said: deque[str | bytes] = deque()
        self._is_gone = False
        self.hearing = asyncio.ensure_future(receive())

    async def message(self) -> str | bytes | None:
        """The next one; None when the caller has gone. Raises TimeoutError when nothing comes for long."""
        if not self._said and not self._is_gone:
            await asyncio.wait({self.hearing}, timeout=IDLE_S)
            if not self.hearing.done():
                raise TimeoutError
            self._hear()
        return None if self._is_gone else self._said.popleft()

    async def stays_until(self, answering: asyncio.Future[str | None]) -> None:
        """Return when that is done, or when the caller has gone."""
        while not answering.done() and not self._is_gone:
            due: set[asyncio.Future[Any]] = {answering}
            if len(self._said) < MOST_AHEAD:
                due.add(self.hearing)
            done, _ = await asyncio.wait(due, return_when=asyncio.FIRST_COMPLETED)
            if self.hearing in done:
                self._hear()

    def _hear(self) -> None:
        message = self.hearing.result()
        if message["type"] == "websocket.disconnect":
            self._is_gone = True
            return
        text = message.get("text")
        self._said.append(message["bytes"] if text is None else text)
        self.hearing = asyncio.ensure_future(self._receive())


class _WrongMessage(InvalidCall):
    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code


def _read(raw: str | bytes) -> _Message:
    """Raises _WrongMessage."""
    text = raw.encode() if isinstance(raw, str) else raw
    if has_more_parts(text, MOST_PARTS):
        raise _WrongMessage(
            "VALIDATION_ERROR", f"it has more than {MOST_PARTS} names, texts, brackets and commas"
        )
    try:
        message = read_json(text)
    except ValueError as exc:
        raise _WrongMessage("INVALID_JSON", f"Invalid JSON: {exc}") from exc
    if not isinstance(message, dict):
        raise _WrongMessage("VALIDATION_ERROR", "Invalid message: it is no object")
    kind = message.get("type", "")
    model = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise _WrongMessage("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:200]}")
    try:
        read: _Message = model.validate_python(message)
    except ValidationError as exc:
        raise _WrongMessage("VALIDATION_ERROR", f"Invalid message: {first_error(exc)}") from exc
    return read


def _refuse_pages(scope: Scope) -> None:
    """Raise Forbidden for a page of another site in somebody's browser, which may open websockets to anywhere."""
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
        raise Forbidden("pages of other sites may not open sessions here")


def _refuse_attaching(scope: Scope) -> None:
    asked = parse_qs(scope["query_string"].decode("latin-1")).get("session_id")
    if asked:
        raise InvalidCall(f"Unknown session_id: {asked[0][:200]}")


# ---- what is said ----


def _call(action: Action, engine: Engine, seed: int | None = None) -> ToolCall:
    asked: dict[str, Any] = {"deadline_s": min(DEADLINE_S, engine.ceilings.deadline_s)}
    if action.timeout_s is not None:
        asked["limits"] = Limits(wall_s=action.timeout_s, cpu_s=action.timeout_s)
        asked["deadline_s"] = max(asked["deadline_s"], action.timeout_s)
    return ToolCall(code=action.code, stdin=action.stdin, echo_last_value=True, random_seed=seed, **asked)


def _observation(result: ToolResult) -> Observation:
    """What came of a program. Raises what a fault is."""
    if (error := result.to_error()) is not None:
        raise error
    told: dict[str, JsonValue] = {
        "status": result.status.value,
        "text": render(result),
        "wall_s": result.usage.wall_s,
        "cpu_s": result.usage.cpu_s,
        "truncated": result.stdout_truncated or result.stderr_truncated,
    }
    ended_by = result.signal or 9
    exit_code = -ended_by if result.exit_code is None else result.exit_code
    return Observation(stdout=result.stdout, stderr=result.stderr, exit_code=exit_code, metadata=told)


def _told(observation: Observation) -> dict[str, JsonValue]:
    told: dict[str, JsonValue] = {
        "observation": observation.model_dump(exclude={"reward", "done"}),
        "reward": observation.reward,
        "done": observation.done,
    }
    if observation.metadata:
        told["metadata"] = observation.metadata
    return told


def _message(kind: str, data: JsonValue) -> str:
    return json.dumps({"type": kind, "data": data})


def _observation_message(observation: Observation) -> str:
    return _message("observation", _told(observation))


def _error(code: Code, message: str, **about: JsonValue) -> str:
    return _message("error", {"message": message, "code": code, **about})


# ---- by HTTP, where each request is an environment of its own ----


async def _reset(exchange: Exchange) -> Answer:
    if exchange.body.strip():
        exchange.parse(Reset)
    return _told_by_http(Observation())


async def _step(exchange: Exchange) -> Answer:
    step = exchange.parse(Step)
    action = step.action
    if step.timeout_s is not None and action.timeout_s is None:
        action = action.model_copy(update={"timeout_s": step.timeout_s})
    return _told_by_http(_observation(await exchange.run(_call(action, exchange.engine))))


def _told_by_http(observation: Observation) -> Answer:
    return Answer(json.dumps({"metadata": None, **_told(observation)}).encode())


def _refuse(error: SandboxError) -> Answer:
    """In FastAPI's words, which the original is written with."""
    detail: JsonValue = error.message
    if isinstance(error, InvalidCall):
        field, _, rule = error.message.partition(": ")
        detail = [{"type": "value_error", "loc": ["body", *field.split(".")], "msg": rule}]
    return Answer(json.dumps({"detail": detail}).encode(), error.http_status, retry_after(error))


def _health(engine: Engine) -> Answer:
    if engine.gateway.obstacle() is None:
        return Answer(b'{"status": "healthy"}')
    return Answer(b'{"status": "unhealthy"}', 503)


def _metadata(_: Scope) -> Answer:
    told = {
        "name": "RoC Sandbox",
        "description": "Runs the Python that language models write. Each step is a program of its own.",
        "readme_content": None,
        "version": "1.0.0",
        "author": None,
        "documentation_url": None,
    }
    return Answer(json.dumps(told).encode())


def _schema(_: Scope) -> Answer:
    observation = Observation.model_json_schema()
    told = {
        "action": Action.model_json_schema(),
        "observation": observation,
        "state": State.model_json_schema(),
        "reset_observation": observation,
    }
    return Answer(json.dumps(told).encode())
