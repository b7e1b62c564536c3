"""The access log: one line for each request that is over, and for each that was refused."""

import logging

from smetric_router.errors import RouterError
from smetric_router.server.connection import ClientConnection
from smetric_router.server.exchange import Exchange
from smetric_router.server.http1 import RequestHead
from smetric_router.server.logs import access_log


def log_access(exchange: Exchange, now: float) -> None:
    """The access log line of an exchange that is over."""
    if not access_log.isEnabledFor(logging.INFO):
        return
    ticket = exchange.ticket
    fields = {
        "client": _shown(exchange.client),
        "request_id": exchange.id.decode("latin-1"),
        "method": exchange.method,
        "path": exchange.target,
        "status": exchange.status,
        "instance": ticket.decision.instance if ticket else "none",
        "reason": ticket.decision.reason if ticket else None,
        "policy": ticket.policy if ticket else "none",
        "attempts": len(exchange.tried),
        "turn": ticket.request.turn if ticket else None,
        "prompt_bytes": exchange.info.chain.length,
        "hit_bytes" if exchange.info.tokens is None else "hit_tokens": ticket.decision.hit if ticket else None,
        "ttft_ms": None if exchange.ttft_s is None else round(exchange.ttft_s * 1000, 2),
        "duration_ms": round((now - exchange.begun_s) * 1000, 2),
        "error": exchange.error,
    }
    access_log.info("request", extra={"fields": fields})


def log_refused(client: ClientConnection, request: RequestHead | None, request_id: bytes, error: RouterError) -> None:
    """The line of what was no request, or one that may not be made; `request`: its head, if it could be read."""
    fields = {
        "client": _shown(client),
        "request_id": request_id.decode("latin-1"),
        "method": request.method.decode("latin-1") if request is not None else None,
        "path": request.target.decode("latin-1") if request is not None else None,
        "status": error.status,
        "error": error.message,
    }
    access_log.info("refused", extra={"fields": fields})


def _shown(client: ClientConnection) -> str | None:
    if not client.address:
        return None
    host, port = client.address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
