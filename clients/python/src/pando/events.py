"""What happens in the pool, as it happens."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator

from . import models
from ._decode import decode
from ._transport import Transport
from .errors import Canceled, InUse, Problem, Unreachable, error_of

FIRST_PAUSE = 0.1  # seconds, before a stream is opened again
LAST_PAUSE = 10.0
SILENCE = 60.0  # seconds; the service sends a comment after 15


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in the pool."""

    id: str
    """Its place: events(after=id) continues after it."""
    gap: bool = False
    """Events are missing here, because the pool no longer has them; info is None."""
    info: models.Event | None = None

    @property
    def verb(self) -> str:
        """What was done, as on the command line; gap if events are missing."""
        return self.info.verb if self.info else "gap"

    @property
    def name(self) -> str:
        """The object, "" if events are missing."""
        return self.info.name if self.info else ""


def follow(transport: Transport, after: str | None) -> Iterator[Event]:
    """Yields events after the one with an ID; None: from now on.

    It continues where it was when the connection is lost or the service restarts. It ends only by an error of the
    service that is not temporary, or when the caller stops.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            with transport.stream("GET", "/v1/events", headers={"Last-Event-ID": after}, timeout=SILENCE) as stream:
                for event in parse(stream.lines(), after or ""):
                    after, pause = event.id or after, FIRST_PAUSE
                    if event.gap or event.info is not None:
                        yield event
        except (Unreachable, InUse, Canceled):
            if after is None:
                raise  # it was never connected: there is no place to continue from
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


def parse(lines: Iterator[bytes], after: str) -> Iterator[Event]:
    """Yields what a stream of server-sent events has. An event without gap and info has only a new ID."""
    kind = data = ""
    for line in lines:
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            after = value
        elif field == "event":
            kind = value
        elif field == "data":
            data = value
        elif line in (b"\n", b"\r\n"):
            if kind == "error" and data:
                raise error_of(decode(Problem, json.loads(data)))
            if kind == "gap":
                yield Event(after, gap=True)
            else:
                yield Event(after, info=decode(models.Event, json.loads(data)) if data else None)
            kind = data = ""
