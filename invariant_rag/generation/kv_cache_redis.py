"""Keys and values in Redis: one entry each, for several machines, in the room that the server has.

An entry is a hash `invariant-rag:NAMESPACE:STEM`, where the namespace is the first half of the SHA-256 of its name and
the stem is that of `kv_cache_files`. Its fields `0`, `1`... joined are the content of an entry's file, which is checked
as a file is: what was cut, renamed or exchanged is never served. A hash is evicted as a whole.

Writers write to `invariant-rag:unfinished:RANDOM`, which expires, and rename it. So nobody reads what is unfinished,
and what a dead writer left goes by itself.

How much room there is and what makes room is the server's business (`maxmemory`, `maxmemory-policy allkeys-lru`), and
so is who may connect. Whoever may write there may change answers.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from invariant_rag.errors import DamagedEntry, ExtraRequired, InvalidChoice, UnusableStore
from invariant_rag.generation.kv_cache_files import digest_of, from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from invariant_rag.generation.kv_cache_files import Entry

_PREFIX = "invariant-rag"
_PIECE = 64 << 20  # bytes of a field; Redis takes 512 MB, and needs a buffer as long as the longest
_UNFINISHED_SECONDS = 600
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_PAUSE_SECONDS = 5.0
_AT_ONCE = 500  # keys that a step of a scan looks at

_logger = logging.getLogger(__name__)


class RedisStore:
    """The entries of a namespace in Redis. Nothing connects before the first entry is read or written.

    A server that does not answer in time is not asked again for five seconds, so that it delays one call and not each.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, with user, password and database as the client `redis` reads
            them. `?socket_timeout=` and `?socket_connect_timeout=` are seconds, 10 and 2 unless told.
        namespace: The namespace of what is read and written.

    Raises:
        ExtraRequired: The client is not installed.
        InvalidChoice: The URL is none of Redis.
    """

    def __init__(self, url: str, namespace: str) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ExtraRequired("redis", "redis") from error
        self.url, self.address, self._namespace = url, without_secrets(url), namespace
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._timeout: type[Exception] = redis.TimeoutError
        # A connection that a restarted server closed is noticed when it is used: so each command is sent twice.
        again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=_ANSWER_SECONDS, socket_connect_timeout=_CONNECT_SECONDS, retry=again
            )
            pool = self._client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # tells unknown options, and does not connect
        except (TypeError, ValueError) as error:
            raise InvalidChoice(
                f"redis_url: expected the address of a Redis server, got {self.address!r}: {error}",
                hint="Such as redis://127.0.0.1:6379/0, or rediss://user:password@host:6379/0 with TLS.",
            ) from error
        self._silent_until = 0.0

    def read(self, stem: str) -> tuple[Entry | None, str | None]:
        """Return the entry, or None, and the field of `CacheStats` that counts a failure, or None."""
        try:
            pieces = self._ask(self._client.hgetall, self._name(stem))
        except self._errors as error:
            _logger.warning("cannot read from %s: %s", self.address, error)
            return None, "disk_errors"
        if not pieces:
            return None, None
        try:
            return from_bytes(_joined(pieces), stem), None
        except DamagedEntry as error:
            _logger.warning("removing a damaged entry, %s", error)
            self.discard(stem)
            return None, "damaged"

    def touch(self, stem: str) -> bool:
        """Mark an entry as used now; return whether there is one."""
        try:
            return bool(self._ask(self._client.touch, self._name(stem)))
        except self._errors as error:
            _logger.warning("cannot look for an entry in %s: %s", self.address, error)
            return False

    def write(self, stem: str, entry: Entry) -> bool:
        """Write an entry; return whether nothing failed."""
        content = memoryview(to_bytes(entry, stem, self._namespace))
        partial = f"{_PREFIX}:unfinished:{uuid4().hex}"
        try:
            for number, start in enumerate(range(0, len(content), _PIECE)):
                with self._client.pipeline() as together:
                    together.hset(partial, str(number), content[start : start + _PIECE])
                    together.expire(partial, _UNFINISHED_SECONDS)
                    self._ask(together.execute)
            with self._client.pipeline() as together:
                together.persist(partial)
                together.rename(partial, self._name(stem))
                self._ask(together.execute)
        except self._errors as error:
            _logger.warning("cannot write an entry to %s: %s", self.address, error)
            return False
        return True

    def discard(self, stem: str) -> None:
        """Remove one entry, whatever it holds."""
        try:
            self._ask(self._client.unlink, self._name(stem))
        except self._errors as error:
            _logger.warning("cannot remove an entry from %s: %s", self.address, error)

    def clear(self) -> None:
        """Remove all entries of the namespace.

        Raises:
            UnusableStore: They cannot be removed.
        """
        try:
            for name in self._client.scan_iter(match=self._name("*"), count=_AT_ONCE):
                self._client.unlink(name)
        except self._errors as error:
            raise UnusableStore(f"cannot clear {self.address}: {error}") from error

    def _name(self, stem: str) -> str:
        return f"{_PREFIX}:{digest_of(self._namespace)[:32]}:{stem}"

    def _ask(self, command: Callable[..., Any], *arguments: Any) -> Any:
        """Return the server's answer.

        Raises:
            Exception: One of `self._errors`.
        """
        if time.monotonic() < self._silent_until:
            raise self._timeout("it did not answer in time a moment ago")
        try:
            return command(*arguments)
        except self._timeout:
            self._silent_until = time.monotonic() + _PAUSE_SECONDS
            raise


def without_secrets(url: str) -> str:
    """Return the address of a Redis server without user, password and options.

    >>> without_secrets("rediss://user:password@cache:6379/1?ssl_cert_reqs=none")
    'rediss://cache:6379/1'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _joined(pieces: dict[bytes, bytes]) -> bytes:
    """Return the content that the fields of a hash hold together; of other fields, what is no entry."""
    return b"".join(pieces[number] for number in sorted(pieces, key=lambda name: (len(name), name)))
