"""Who a request belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever shares one name in the keys file, and what of the service is theirs."""

    name: str
    weight: int = 1
    max_in_flight: int | None = None


#: Everybody, where there are no keys.
ANONYMOUS = Tenant("")


def tenant_of(scope: Scope) -> Tenant:
    """Whose request this is. Every request that a route sees has one."""
    tenant: Tenant = scope["tenant"]
    return tenant


class Authentication:
    """Tells the routes whose request it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its tenant in its scope."""
        if scope["type"] == "http":
            scope["tenant"] = ANONYMOUS
        await self._app(scope, receive, send)
