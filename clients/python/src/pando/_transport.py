"""HTTP over a unix socket or TLS: connections that are reused, repetitions after lost ones, and errors.

It uses http.client, so that the package has no dependencies: see pyproject.toml.
"""

from __future__ import annotations

import dataclasses
import http.client
import ipaddress
import json
import os
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import IO, Any, TypeVar

from ._decode import decode
from .errors import PandoError, Problem, Unreachable, error_of, internal, invalid

T = TypeVar("T")

Content = bytes | IO[bytes] | Iterable[bytes]
"""What a request can send as its body. Only bytes can be sent again after a lost connection."""

DEFAULT_SOCKET = "/run/pando/pando.sock"
SOCKET_VARIABLE = "PANDO_SOCKET"

CONNECT_TIMEOUT = 10.0  # seconds
FIRST_PAUSE = 0.05  # seconds, before a request is repeated
LAST_PAUSE = 1.0
MAX_IDLE = 16  # connections that wait for further requests
MAX_ERROR = 1 << 20  # bytes of an error that are read
BLOCK = 1 << 16


class UnixConnection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("pando", timeout=CONNECT_TIMEOUT)
        self.path = path

    def connect(self) -> None:
        """Connects."""
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            s.settimeout(self.timeout)
            s.connect(self.path)
        except BaseException:
            s.close()
            raise
        self.sock = s


class Stream:
    """A body that is read while it arrives: of an export, or of events. Close it, or use it in a with statement."""

    def __init__(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self._response, self._connection = response, connection

    def read(self, size: int = -1) -> bytes:
        """Reads up to size bytes; all if it is negative. Unreachable if the body was cut off."""
        try:
            return self._response.read(None if size < 0 else size)
        except (OSError, http.client.HTTPException) as e:
            raise unreachable(f"the body was cut off: {e or type(e).__name__}") from e

    def lines(self) -> Iterator[bytes]:
        """Reads lines, until the service ends the body."""
        try:
            while line := self._response.readline():
                yield line
        except (OSError, http.client.HTTPException) as e:
            raise unreachable(f"the stream was cut off: {e or type(e).__name__}") from e

    def __iter__(self) -> Iterator[bytes]:
        while block := self.read(BLOCK):
            yield block

    def close(self) -> None:
        """Closes the connection."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport:
    """Sends requests. It may be used by several threads, and after a fork."""

    def __init__(
        self,
        *,
        socket_path: str | None = None,
        url: str | None = None,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        timeout: float | None = None,
        patience: float = 10.0,
    ) -> None:
        if url is not None and socket_path is not None:
            raise invalid("socket and url cannot be combined", "remove one of them")
        self.timeout, self.patience = timeout, patience
        self.address = url or socket_path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET
        self._url = check_url(url) if url else None
        self._token, self._ssl = token, ssl_context
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()
        self._connected = False  # at least once

    # What methods of API call.

    def json(self, kind: type[T], method: str, path: str, **request: Any) -> T:
        """Sends a request, and returns its result. A field etag gets the ETag."""
        status, headers, text = self.send(method, path, **request)
        try:
            value = json.loads(text)
        except ValueError as e:
            raise internal(f"the service answers {method} {path} with {status} and no JSON: {e}") from e
        result: Any = decode(kind, value)
        if tag := headers.get("ETag"):
            result = dataclasses.replace(result, etag=tag)
        return result  # type: ignore[no-any-return]

    def nothing(self, method: str, path: str, **request: Any) -> None:
        """Sends a request that has no result."""
        self.send(method, path, **request)

    def stream(self, method: str, path: str, **request: Any) -> Stream:
        """Sends a request, and returns its body as a stream."""
        response, connection = self._exchange(method, path, **request)
        return Stream(response, connection)

    # Requests.

    def send(self, method: str, path: str, **request: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Sends a request, and reads all of its response.

        If the connection is lost, a request that can be repeated without harm is, until patience is over: one that was
        not sent, that reads, that sets something, that names what it destroys by ID, or that has an Idempotency-Key.
        """
        headers: Mapping[str, str | None] = request.get("headers") or {}
        keyed = headers.get("Idempotency-Key") is not None
        content = request.get("content")
        fields = {**(request.get("body") or {}), **(request.get("query") or {})}
        harmless = method in ("GET", "PUT") or any(fields.get(f) for f in ("dry_run", "id", "ids"))
        again = (harmless or keyed) and (content is None or isinstance(content, bytes))
        end, pause, repeated = time.monotonic() + self.patience, FIRST_PAUSE, False
        while True:
            try:
                return self._once(method, path, **request)
            except Unreachable as e:
                # A service that was never there is an error at once; one that was may be restarting.
                possible = again or not e.sent
                if not possible or not self._connected or time.monotonic() + pause > end:
                    raise
            except PandoError as e:
                # The first request is still being undone, or carried out.
                running = keyed and repeated and e.kind == "conflict" and e.status == http.client.CONFLICT
                if not running or time.monotonic() + pause > end:
                    raise
            repeated = True
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _once(self, method: str, path: str, **request: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Sends a request once, and reads all of its response."""
        response, connection = self._exchange(method, path, **request)
        try:
            text = response.read()
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise lost(method, path, e) from e
        except BaseException:
            connection.close()
            raise
        self._keep(connection, response)
        return response.status, response.headers, text

    def _exchange(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | None] | None = None,
        body: Mapping[str, Any] | None = None,
        content: Content | None = None,
        timeout: float | None = None,
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        """Sends a request once, and returns a response that is not an error."""
        fields = {k: str(v) for k, v in (headers or {}).items() if v is not None}
        if self._token:
            fields["Authorization"] = "Bearer " + self._token
        data: Content | None = content
        if body is not None:
            data = json.dumps({k: v for k, v in body.items() if v is not None}, default=plain).encode()
            fields["Content-Type"] = "application/json"
        elif content is not None:
            fields["Content-Type"] = "application/x-tar"  # the service finds out whether it is compressed
        if pairs := parameters(query or {}):
            path += "?" + urllib.parse.urlencode(pairs)

        connection = self._take()
        try:
            connection.sock.settimeout(timeout or self.timeout)
            try:
                connection.request(method, path, body=data, headers=fields)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:
                    raise
                # The service has answered before it has read all: its answer says why.
            response = connection.getresponse()
            if response.status >= http.client.BAD_REQUEST:
                text = response.read(MAX_ERROR)
                self._keep(connection, response)
                raise problem_of(response, text)
        except PandoError:
            raise
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise lost(method, path, e) from e
        except BaseException:
            connection.close()  # an interrupt: the response must not go to the next request
            raise
        return response, connection

    # Connections.

    def _take(self) -> http.client.HTTPConnection:
        """Returns a connection."""
        with self._lock:
            if self._pid != os.getpid():  # after a fork they are the parent's
                self._idle, self._pid = [], os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if connection.sock is not None and not readable(connection.sock):
                    return connection
                connection.close()  # the service has closed it

        connection = self._new()
        try:
            connection.connect()
        except BaseException as e:
            connection.close()
            if isinstance(e, OSError):
                hint = "start it with `pando serve`, or name its socket in $PANDO_SOCKET"
                why = e.strerror or str(e)
                raise unreachable(f"cannot reach the service at {self.address}: {why}", hint, sent=False) from e
            raise
        self._connected = True
        return connection

    def _new(self) -> http.client.HTTPConnection:
        if self._url is None:
            return UnixConnection(self.address)
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            context = self._ssl or ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT, context=context)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT)

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        """Keeps a connection for the next request, if it can have one."""
        if response.isclosed() and not response.will_close and connection.sock is not None:
            with self._lock:
                if len(self._idle) < MAX_IDLE and self._pid == os.getpid():
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        """Closes connections that are idle."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def readable(s: socket.socket) -> bool:
    """Reports whether a connection has something to read, which may be its end."""
    p = select.poll()
    p.register(s, select.POLLIN)
    return bool(p.poll(0))


def check_url(url: str) -> urllib.parse.SplitResult:
    """Returns the parts of a URL. Invalid if a token would cross a network without TLS."""
    u = urllib.parse.urlsplit(url)
    if u.scheme not in ("http", "https") or not u.hostname or u.path.strip("/") or u.query:
        raise invalid(f"{url!r} is not the URL of a service", "use https://HOST:PORT")
    if u.scheme == "http" and not is_loopback(u.hostname):
        raise invalid(f"a token must not be sent to {u.hostname} without TLS", "use https://")
    return u


def is_loopback(host: str) -> bool:
    """Reports whether a host is this one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parameters(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the parameters of a query that are there."""
    pairs: list[tuple[str, str]] = []
    for key, value in query.items():
        if value is None:
            continue
        for v in value if isinstance(value, (list, tuple)) else [value]:
            text = "true" if v is True else "false" if v is False else plain(v) if isinstance(v, datetime) else str(v)
            pairs.append((key, text))
    return pairs


def plain(value: Any) -> Any:
    """Returns what JSON can hold for an argument."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
    if isinstance(value, datetime):
        if value.tzinfo is None:
            value = value.astimezone()
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value)


def quote(segment: object) -> str:
    """Returns a segment of a path, escaped."""
    return urllib.parse.quote(str(segment), safe="")


def problem_of(response: http.client.HTTPResponse, text: bytes) -> PandoError:
    """Returns the error of a response."""
    try:
        value = json.loads(text)
        problem = decode(Problem, value)
    except (ValueError, PandoError):
        return internal(f"the service answers {response.status} {response.reason}")
    return error_of(dataclasses.replace(problem, status=response.status))


def unreachable(detail: str, hint: str = "", *, sent: bool = True) -> Unreachable:
    """Returns the error of a service that does not answer."""
    return Unreachable(Problem("urn:pando:unreachable", "", 0, detail, "unreachable", hint=hint), sent=sent)


def lost(method: str, path: str, why: Exception) -> Unreachable:
    """Returns the error of a connection that ended before the response."""
    return unreachable(f"the connection was lost during {method} {path}: {why or type(why).__name__}")
