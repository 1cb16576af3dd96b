"""A relay of TCP connections, which a test can cut: a server behind it goes away without being restarted."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread
from typing import Self


class Relay:
    """Passes connections to a port of this machine on; a context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: list[socket.socket] = []
        self.asked: list[bytes] = []  # what clients sent
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Take connections, at the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                Thread(target=_copy, args=(near, far, self.asked), daemon=True).start()
                Thread(target=_copy, args=(far, near, []), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, passed: list[bytes]) -> None:
    with suppress(OSError):  # the relay was cut, or one side has left
        while data := source.recv(65536):
            passed.append(data)
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
