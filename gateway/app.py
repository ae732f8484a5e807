"""The ASGI application: routes, and the one place where an error becomes an answer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import grading, judging
from gateway.dead import make_dead_letters
from gateway.dialects import DIALECTS
from gateway.engine import Door, Engine
from gateway.gateway import Gateway
from gateway.openapi import add_hot_routes, add_keys
from gateway.pages import DOCS_FILES, make_pages
from gateway.reader import CallerGone, CallReader
from gateway.routes import BatchRoute, JobRoute, JobsRoute, RunRoute, retry_after, send_json
from gateway.tenants import Authentication, folder_of
from sandbox.errors import InternalError, InvalidCall, SandboxError, Unauthorized
from sandbox.queue import CallQueue
from sandbox.settings import Settings

log = logging.getLogger(__name__)

_TITLE = "RoC Sandbox"
_DESCRIPTION = "Runs the Python that language models write: a call goes in, a result comes out."


def create_app(settings: Settings, queue: CallQueue) -> FastAPI:
    """The application of one gateway process.

    Its lifespan opens and closes the queue; `app.state.gateway` is the Gateway behind it. Raises ConfigError for
    a keys file that is broken.
    """
    gateway = Gateway(settings, queue)
    reader = CallReader(settings.gateway, settings.ceilings)
    release = version("roc-sandbox")
    engine = Engine(gateway, reader)
    doors = [
        *grading.doors(engine),
        *judging.doors(engine),
        *(door for name in settings.gateway.dialects for door in DIALECTS[name](engine)),
    ]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running(), AsyncExitStack() as exits:
            for door in doors:
                await exits.enter_async_context(door.running())
            yield

    app = _App(
        title=_TITLE,
        description=_DESCRIPTION,
        version=release,
        lifespan=lifespan,
        docs_url=None,  # pages.py has one that needs no internet
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _no_such_route, RequestValidationError: _wrong_request},
    )
    app.state.gateway = gateway
    app.reader = reader
    app.keys_are_needed = gateway.keys.are_needed
    hot: dict[str, ASGIApp] = {
        "/v1/run": RunRoute(gateway, reader),
        "/v1/batch": BatchRoute(gateway, reader),
        "/v1/jobs": JobsRoute(gateway, reader),
    }
    app.hot = {path: Answers(Authentication(route, gateway.keys, {}), gateway) for path, route in hot.items()}
    app.router.routes[:0] = [
        *(Route(path, route, methods=["POST"]) for path, route in hot.items()),
        Route("/v1/jobs/{call_id:path}", JobRoute(gateway, reader), methods=["GET", "DELETE"]),
        *map(_route, doors),
    ]
    app.include_router(make_pages(gateway, reader, _TITLE, release))
    app.include_router(make_dead_letters(gateway))
    app.mount(DOCS_FILES, StaticFiles(packages=[("fastapi_offline", "static")]))
    app.add_middleware(Authentication, keys=gateway.keys, doors={door.path: door.scope for door in doors})
    app.add_middleware(Answers, gateway=gateway, doors=[door.path for door in doors])
    return app


def _route(door: Door) -> BaseRoute:
    if door.path.endswith("/"):
        return Mount(door.path.rstrip("/"), door.app)
    return Route(door.path, door.app, methods=list(door.methods))


class _App(FastAPI):
    """FastAPI, with the hot routes in its description, and a short way to them."""

    reader: CallReader
    keys_are_needed: bool
    hot: Mapping[str, ASGIApp]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lead what is posted to the hot routes past FastAPI's layers, which do nothing there for 15 µs of CPU.

        Another method goes the long way, and is refused.
        """
        app: ASGIApp = super().__call__
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self.hot.get(scope["path"], app)
        await app(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The description of all routes."""
        description = super().openapi()
        add_hot_routes(description, self.reader)
        if self.keys_are_needed:
            add_keys(description)
        return description


class Answers:
    """Sees to it that every request is answered and counted, whatever comes out of the routes.

    A SandboxError is answered as it says. Anything else is a bug: the caller gets an incident id, and the log
    gets the traceback under the same id.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, doors: Iterable[str] = ()) -> None:
        self._app = app
        self._gateway = gateway
        self._requests = gateway.metrics.requests
        self._routes = {
            "/v1/run",
            "/v1/batch",
            "/v1/jobs",
            "/v1/status",
            "/healthz",
            "/readyz",
            "/metrics",
            *doors,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer for it if it comes back as an exception."""
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code: int | str = "gone"
        started = False

        async def watched(message: Message) -> None:
            nonlocal code, started
            if message["type"] == "http.response.start":
                code, started = message["status"], True
                if self._gateway.draining:  # so that the next request of this caller goes elsewhere
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except CallerGone:
            log.debug("caller gone", extra={"route": scope["path"]})
        except Exception as exc:
            if started:
                raise  # Half an answer is out: the server logs this and cuts the connection.
            await send_error(watched, _as_error(exc))
            # A route's frame holds it, and with the frame a body, until the collector comes.
            exc.__traceback__ = None
        finally:
            route = self._route(scope["path"])
            self._requests.labels(route, code).inc()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same for a websocket: counted when it is let in or refused, which an answer in HTTP does."""
        websockets = self._gateway.metrics.websockets
        is_open = False

        async def watched(message: Message) -> None:
            nonlocal is_open
            code = _code_of(message)
            if code is not None and not is_open:
                self._requests.labels(self._route(scope["path"]), code).inc()
            if message["type"] == "websocket.accept":
                is_open = True
                websockets.inc()
            await send(message)

        async def refuse(message: Message) -> None:
            await watched({**message, "type": f"websocket.{message['type']}"})

        try:
            await self._app(scope, receive, watched)
        except CallerGone:
            log.debug("caller gone", extra={"route": scope["path"]})
        except Exception as exc:  # noqa: BLE001 - whatever came out of a route, its caller hears of it
            error = _as_error(exc)
            if is_open:
                await watched({"type": "websocket.close", "code": 1011, "reason": error.message[:100]})
            else:
                await send_error(refuse, error)
            exc.__traceback__ = None
        finally:
            if is_open:
                websockets.dec()

    def _route(self, path: str) -> str:
        """A path as the metrics know it: what a caller can choose in it is left out."""
        if path.startswith("/v1/jobs/"):
            return "/v1/jobs/ID"
        if path.startswith("/v1/dead"):
            return "/v1/dead"
        if (folder := folder_of(path)) in self._routes:
            return folder
        return path if path in self._routes else "other"


def _code_of(message: Message) -> int | None:
    """The status by which a websocket is let in or refused; None for what comes after that."""
    if message["type"] == "websocket.http.response.start":
        status: int = message["status"]
        return status
    return {"websocket.accept": 101, "websocket.close": 403}.get(message["type"])


def _as_error(exc: Exception) -> SandboxError:
    if isinstance(exc, SandboxError):
        return exc
    incident = uuid4().hex
    log.error("request failed", exc_info=exc, extra={"incident": incident})
    return InternalError(f"the service failed; its log tells more under {incident}")


async def send_error(send: Send, error: SandboxError) -> None:
    """Answer with an error, in the shape that the client reads."""
    headers = retry_after(error)
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.http_status, json.dumps(error.to_wire()).encode(), headers)


async def _no_such_route(_: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    name = "".join(exc.detail.title().split())
    error = {"name": name, "message": exc.detail}
    return JSONResponse({"error": error}, status_code=exc.status_code, headers=exc.headers)


async def _wrong_request(_: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    error = InvalidCall(f"{first['loc'][-1]}: {first['msg']}")
    return JSONResponse(error.to_wire(), status_code=error.http_status)
