"""Client of Pando: instant, disposable, copy-on-write volumes.

    import subprocess
    import pando

    with pando.clone("web") as v:
        subprocess.run(["make", "test"], cwd=v.path, check=True)

The volume is destroyed at the end of the with statement. See docs/python.md of Pando.
"""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from . import models
from ._transport import DEFAULT_SOCKET, SOCKET_VARIABLE, Stream
from .client import Client
from .errors import (
    Canceled,
    Changed,
    Conflict,
    Damaged,
    Exists,
    FieldError,
    Internal,
    InUse,
    Invalid,
    IOFailed,
    NoSpace,
    NotFound,
    PandoError,
    Permission,
    Problem,
    TooNew,
    Unreachable,
    Unsupported,
)
from .events import Event
from .operations import Operation
from .volume import Clone, Snapshot, Volume

_P = ParamSpec("_P")
_R = TypeVar("_R")


def connect(
    socket: str | os.PathLike[str] | None = None,
    url: str | None = None,
    token: str | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    timeout: float | None = None,
    patience: float = 10.0,
) -> Client:
    """Returns a client of the service at a unix socket, or at a URL.

    Without both it is the socket in $PANDO_SOCKET, or /run/pando/pando.sock. The URL is https://HOST:PORT, or http://
    and a loopback address, with a token that `pando serve token` has made. ssl_context says which certificates to
    trust, if not those of the system. timeout is how many seconds a response may stay silent; None: for ever, as a
    clone may wait for its golden. patience is for how many seconds a request is repeated whose connection was lost. It
    does not connect yet.
    """
    return Client(socket, url, token, ssl_context=ssl_context, timeout=timeout, patience=patience)


@functools.cache
def _client(_socket: str | None) -> Client:
    return Client()


def _default(method: Callable[Concatenate[Client, _P], _R]) -> Callable[_P, _R]:
    """Returns a method of Client as a function, which uses the service in $PANDO_SOCKET or at its usual place."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(_client(os.environ.get(SOCKET_VARIABLE)), *args, **kwargs)

    del call.__wrapped__  # which has self in its signature
    return call


clone = _default(Client.clone)
volume = _default(Client.volume)
volumes = _default(Client.volumes)
goldens = _default(Client.goldens)
import_golden = _default(Client.import_golden)
events = _default(Client.events)

__all__ = [
    "DEFAULT_SOCKET",
    "SOCKET_VARIABLE",
    "Canceled",
    "Changed",
    "Client",
    "Clone",
    "Conflict",
    "Damaged",
    "Event",
    "Exists",
    "FieldError",
    "IOFailed",
    "InUse",
    "Internal",
    "Invalid",
    "NoSpace",
    "NotFound",
    "Operation",
    "PandoError",
    "Permission",
    "Problem",
    "Snapshot",
    "Stream",
    "TooNew",
    "Unreachable",
    "Unsupported",
    "Volume",
    "clone",
    "connect",
    "events",
    "goldens",
    "import_golden",
    "models",
    "volume",
    "volumes",
]
