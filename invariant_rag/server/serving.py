"""The process: uvicorn with limits on connections and a deadline for heads of requests, and a shutdown that waits."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread

import h11
import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from invariant_rag.errors import InvalidChoice, UnusableFile
from invariant_rag.server.errors import http_error
from invariant_rag.server.settings import Settings

_CONNECTIONS = 8  # connections of all addresses together, in those that one may have
_MOST_READ = 16_384
"""Bytes that are read at a time: a body in chunks of a byte each takes that much longer to take apart."""
_SWITCH_SECONDS = 0.0005
"""That a thread may compute before the event loop gets the interpreter: with the usual 5 ms, threads add up."""
_NO_HTTP = {
    400: "expected a request of HTTP/1.1, got something else",
    431: "expected a head of at most 64 KiB, got a longer one",
    501: "expected no Transfer-Encoding but chunked, got another one",
}


class Connections:
    """Open connections. Where there are too many, the oldest that waits for a request ends: nobody is locked out."""

    def __init__(self, settings: Settings) -> None:
        self._per_address, self._unlimited = settings.max_connections, settings.trusted_proxies
        self._open: dict[str, dict[DeadlineProtocol, None]] = {}  # the oldest first

    def add(self, connection: DeadlineProtocol) -> None:
        """Note a connection, and close another one if there are too many of its address, or of all."""
        own = self._open.setdefault(connection.address, {})
        own[connection] = None
        if len(own) > self._per_address and connection.address not in self._unlimited:
            _close_oldest(own)
        elif sum(map(len, self._open.values())) > _CONNECTIONS * self._per_address:
            _close_oldest(max(self._open.values(), key=len))

    def remove(self, connection: DeadlineProtocol) -> None:
        """Forget a connection."""
        own = self._open.get(connection.address, {})
        own.pop(connection, None)
        if not own:
            self._open.pop(connection.address, None)


def _close_oldest(connections: Mapping[DeadlineProtocol, None]) -> None:
    waiting = next((each for each in connections if each.waits and not each.transport.is_closing()), None)
    if waiting is not None:
        waiting.transport.close()


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 in which a client has to send the head of its request in time: uvicorn has no timeout within a head."""

    head_seconds = 20.0
    open_connections: Connections
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for the first head."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if hasattr(transport, "max_size"):
            transport.max_size = _MOST_READ
        self._await_head()
        self.open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Read what came, and wait for the rest of a head."""
        super().data_received(data)
        if self._head_timer is None:
            if not self._running:
                self._await_head()
        elif self._running:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self.open_connections.remove(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP in the shape of all errors, where uvicorn has plain text. It calls this as it catches.

        In the middle of another answer, the connection is closed without a word.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = getattr(sys.exc_info()[1], "error_status_hint", 400)
            response = http_error(HTTPException(status, _NO_HTTP.get(status, msg), {"connection": "close"}))
            head = h11.Response(status_code=status, headers=response.raw_headers)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def address(self) -> str:
        """Where the other end is."""
        return "" if self.client is None else self.client[0]

    @property
    def waits(self) -> bool:
        """Whether no request has come whole since the last answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def _running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._close_idle)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_idle(self) -> None:
        self._head_timer = None
        if not self._running and not self.transport.is_closing():
            self.transport.close()


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket at an address, before the time that loading a model takes. The port 0 is any that is free.

    Clients are told that nobody is there until a server listens at it.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise InvalidChoice(
            f"cannot listen at {host}:{port}: {error.strerror}",
            hint="Choose another --port, or an address of this machine as --host.",
        ) from error
    return reserved


def server_of(app: FastAPI, settings: Settings, host: str, port: int) -> uvicorn.Server:
    """Return a server that is not started yet.

    After SIGTERM or SIGINT it takes no new connection, finishes what runs within `settings.timeout`, and ends.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    AppStatus.enable_automatic_graceful_drain = False  # streams end by themselves, and are not cut at SIGTERM
    limits = {"head_seconds": settings.body_timeout, "open_connections": Connections(settings)}
    protocol = type("Protocol", (DeadlineProtocol,), limits)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=sorted(settings.trusted_proxies),
        timeout_graceful_shutdown=int(settings.timeout),
    )
    return uvicorn.Server(config)


@contextmanager
def in_thread(server: uvicorn.Server) -> Iterator[str]:
    """Run a server in a thread, and give its address; it has ended when the block ends."""
    thread = Thread(target=server.run, name="invariant-rag-server", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    if not server.started:
        raise UnusableFile(f"cannot listen at {server.config.host}:{server.config.port}", hint="Choose another port.")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://{server.config.host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
