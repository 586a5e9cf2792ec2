"""Long work of the service: publish, rebase, push, gc."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import models
from ._api import API
from .errors import PandoError, error_of

Progress = Callable[[models.Operation], None]
"""A function that is called with an operation while it runs, and at its end."""

POLL = 60.0  # seconds of one request that waits; the service ends it earlier when the operation ends
POLL_PROGRESS = 0.5  # the same, with progress


class Operation:
    """Work of the service that goes on when the request that began it has been answered."""

    def __init__(self, api: API, info: models.Operation) -> None:
        self._api = api
        self.info = info
        """What was last known of it."""

    def __repr__(self) -> str:
        return f"<pando.Operation {self.info.verb} {self.info.ref} {self.info.state}>"

    @property
    def id(self) -> str:
        """Its name for other programs."""
        return self.info.id

    @property
    def state(self) -> str:
        """Its state when it was last known: running, done, failed, canceled."""
        return self.info.state

    @property
    def error(self) -> PandoError | None:
        """The error of one that failed or was canceled."""
        return error_of(self.info.error) if self.info.error else None

    def refresh(self) -> models.Operation:
        """Asks for its state and progress."""
        self.info = self._api.show_operation(self.id)
        return self.info

    def wait(self, progress: Progress | None = None, timeout: float | None = None) -> Any:
        """Waits for its end, and returns its result: what the command prints with --json.

        Its error is raised if it failed or was canceled, TimeoutError if it still runs after timeout seconds. progress
        is called about twice a second, and at the end.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            patience = POLL if progress is None else POLL_PROGRESS
            if end is not None:
                patience = min(patience, max(0.0, end - time.monotonic()))
            self.info = self._api.wait_operation(self.id, timeout_seconds=patience)
            if progress is not None:
                progress(self.info)
            if self.info.error:
                raise error_of(self.info.error)
            if self.state != "running":
                return self.info.result
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.info.verb} {self.info.ref} still runs after {timeout} s")

    def cancel(self) -> None:
        """Asks it to undo what it did, and to end. One that has ended stays as it is."""
        self.info = self._api.cancel_operation(self.id)
