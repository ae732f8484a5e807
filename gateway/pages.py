"""The routes for people, probes and scrapers. They are rare, so FastAPI serves them as it likes."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.responses import HTMLResponse

from gateway.gateway import Gateway
from gateway.reader import CallReader
from sandbox.calls import Limits
from sandbox.errors import Unavailable
from sandbox.queue import Backlog, WorkerInfo
from sandbox.settings import CeilingSettings

#: Where the parts of the page `/docs` are served, which FastAPI would let the browser fetch from a stranger.
DOCS_FILES = "/docs/files"


class Health(BaseModel):
    """That something is so, or why not."""

    ok: bool
    reason: str | None = None


class ServiceLimits(BaseModel):
    """What a call and a request may ask for."""

    ceilings: CeilingSettings = Field(description="More is refused with 422.")
    defaults: Limits = Field(description="Of a call that names none.")
    max_batch: int = Field(description="Calls in one batch request.")
    max_body_bytes: int = Field(description="Of one request.")
    max_in_flight: int = Field(description="Calls that one gateway holds.")


class Status(BaseModel):
    """The service as this gateway sees it."""

    version: str
    namespace: str
    ready: bool = Field(description="Whether a call would be served now.")
    reason: str | None = Field(description="Why not.")
    workers: list[WorkerInfo] = Field(description="Those that were alive a second ago.")
    backlog: Backlog | None = Field(description="Calls of all gateways; null when Redis is away.")
    in_flight: int = Field(description="Calls of this gateway process.")
    limits: ServiceLimits


def make_pages(gateway: Gateway, reader: CallReader, title: str, version: str) -> APIRouter:
    """All routes but the two hot ones."""
    router = APIRouter()
    bounds = gateway.settings.gateway
    limits = ServiceLimits(
        ceilings=reader.ceilings,
        defaults=reader.defaults,
        max_batch=reader.max_batch,
        max_body_bytes=bounds.max_body_bytes,
        max_in_flight=bounds.max_in_flight,
    )

    @router.get("/v1/status")
    async def status() -> Status:
        """Version, workers, backlog and limits of the service."""
        obstacle = gateway.obstacle()
        return Status(
            version=version,
            namespace=gateway.settings.redis.namespace,
            ready=obstacle is None,
            reason=obstacle and obstacle.sentence,
            workers=gateway.readiness.workers,
            backlog=await _backlog(gateway),
            in_flight=gateway.admission.held,
            limits=limits,
        )

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether this process lives. It asks nobody else, so Redis's troubles restart no gateway."""
        return Health(ok=True)

    @router.get(
        "/readyz", responses={503: {"model": Health, "description": "It would not; the reason says why."}}
    )
    async def readyz(response: Response) -> Health:
        """Whether a call would be served now."""
        obstacle = gateway.obstacle()
        if obstacle is None:
            return Health(ok=True)
        response.status_code = 503
        return Health(ok=False, reason=obstacle.sentence)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The description of the routes, to read and to try. Its links are relative, for proxies with a prefix."""
        files = DOCS_FILES.lstrip("/")
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url=f"{files}/swagger-ui-bundle.js",
            swagger_css_url=f"{files}/swagger-ui.css",
            swagger_favicon_url=f"{files}/favicon.png",
            # Or it shows our description to a stranger's service.
            swagger_ui_parameters={"validatorUrl": None},
        )

    return router


async def _backlog(gateway: Gateway) -> Backlog | None:
    obstacle = gateway.readiness.obstacle()
    if obstacle is not None and obstacle.word == "no_redis":
        return None
    try:
        return await gateway.queue.backlog()
    except Unavailable:
        return None
