"""A relay of TCP connections, which a test can cut: a server behind it goes away without being restarted."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread
from typing import Self


class Relay:
    """Passes connections to a port of this machine on; a context manager. After `cut`, `start` takes them again."""

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

    def start(self) -> None:
        """Take connections, always at the same port."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open.append(listener)
        Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        while self._open:
            _close(self._open.pop())

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for ends, passed in (((near, far), self.asked), ((far, near), [])):
                    Thread(target=_copy, args=(*ends, passed), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, passed: list[bytes]) -> None:
    with suppress(OSError):  # the relay was cut, or one side has left
        while data := source.recv(65536):
            passed.append(data)
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
