"""Volumes, and clones that last as long as a with statement."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import secrets
import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import models
from .errors import Conflict, NotFound, PandoError, Problem, Unreachable
from .operations import Operation

if TYPE_CHECKING:
    from ._api import API
    from ._transport import Stream

Freeze = Literal["if_needed", "always", "never"]
Seconds = float | timedelta

log = logging.getLogger("pando")


def new_key() -> str:
    """Returns an Idempotency-Key that nobody else has."""
    return uuid.uuid4().hex


def new_name(origin: str) -> str:
    """Returns a name that no other volume has, for a clone of something."""
    start = re.sub(r"[^A-Za-z0-9]+", "-", origin.partition("@")[0]).strip("-")[:40]
    return f"{start or 'clone'}-{secrets.token_hex(8)}"


def seconds(time: Seconds | None) -> float | None:
    """Returns a time in seconds."""
    return time.total_seconds() if isinstance(time, timedelta) else time


class Volume:
    """A volume of the pool."""

    def __init__(self, api: API, info: models.Volume | models.Info | models.Details) -> None:
        self._api = api
        self.info: models.Volume | models.Info | models.Details = info
        """What was last known of it."""
        self.kept = False

    def __repr__(self) -> str:
        return f"<pando.Volume {self.name} {self.info.state}>"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    @property
    def id(self) -> str:
        """Its identity, which stays when it is renamed."""
        return self.info.id

    @property
    def labels(self) -> dict[str, str]:
        """Its labels when they were last known."""
        return self.info.labels

    @property
    def path(self) -> Path:
        """Where it is mounted. Conflict if it is not."""
        if not self.info.mountpoint:
            raise _not_mounted(self.name)
        return Path(self.info.mountpoint)

    def refresh(self) -> models.Details:
        """Asks for all that is known of it, measured now."""
        details = self._api.show_volume(self.name)
        self.info = details
        return details

    def keep(self) -> None:
        """Lets it stay after the with statement of its clone."""
        self.kept = True

    # Mounts.

    def mount(self, path: str | os.PathLike[str] | None = None, *, dev: bool = False, suid: bool = False) -> Path:
        """Mounts it, in a directory or below the pool, and returns where. dev, suid: devices and set-user-ID work."""
        where = os.fspath(path) if path is not None else None
        self.info = self._api.mount_volume(self.name, dir=where, dev=dev or None, suid=suid or None)
        return self.path

    def unmount(self) -> None:
        """Unmounts it. InUse if a process uses it."""
        self.info = self._api.unmount_volume(self.name)

    # Copies.

    def snapshot(
        self, name: str | None = None, *, labels: Mapping[str, str] | None = None, freeze: Freeze | None = None
    ) -> Snapshot:
        """Takes a snapshot, also while it is in use. Without a name it gets the time as its name."""
        info = self._api.create_snapshot(self.name, name=name, labels=labels, freeze=freeze, idempotency_key=new_key())
        return Snapshot(self._api, info)

    def snapshots(self) -> list[Snapshot]:
        """Lists its snapshots, the oldest first."""
        return [Snapshot(self._api, i) for i in self._api.list_snapshots(self.name).items]

    def rewind(self, snapshot: Snapshot | str, *, detach: bool = False) -> models.RewoundVolume:
        """Restores it to one of its snapshots. With detach it may be mounted, and is mounted again."""
        name = snapshot.short_name if isinstance(snapshot, Snapshot) else snapshot
        result = self._api.rewind_volume(self.name, snapshot=name, detach=detach or None)
        self.refresh()
        return result

    def fork(
        self,
        name: str | None = None,
        *,
        mount: bool = True,
        ttl: Seconds | None = None,
        labels: Mapping[str, str] | None = None,
        freeze: Freeze | None = None,
    ) -> Clone:
        """Clones it as it is now, also while it is in use. The fork lasts as long as its with statement."""
        request: dict[str, Any] = {
            "name": name or new_name(self.name),
            "mount": mount,
            "ttl_seconds": seconds(ttl),
            "labels": labels,
            "freeze": freeze,
        }
        return Clone(self._api, self.name, request, fork=True)

    def diff(self, other: str | Volume | Snapshot | None = None) -> models.Difference:
        """Lists what it has changed since another volume, snapshot or generation; None: since its origin."""
        before = other if isinstance(other, str) else other.name if other is not None else self.info.origin
        return self._api.diff(a=before, b=self.name)

    def export(self, format: Literal["tar", "tar.zst", "raw", "qcow2"] = "tar") -> Stream:
        """Returns its files as an archive, or its image: a stream to read and to close."""
        return self._api.export(self.name, format=format)

    # Work.

    def publish(
        self,
        golden: str | None = None,
        *,
        keep: int | None = None,
        labels: Mapping[str, str] | None = None,
        preset: str | None = None,
        freeze: Freeze | None = None,
        force: bool = False,
    ) -> Operation:
        """Begins to make the next generation of a golden from it; None: of the golden that it descends from."""
        info = self._api.publish_golden(
            golden or self.info.golden,
            volume=self.name,
            keep=keep,
            labels=labels,
            preset=preset,
            freeze=freeze,
            force=force or None,
            idempotency_key=new_key(),
        )
        return Operation(self._api, info)

    def rebase(self, onto: str, *, keep: Literal["ours", "theirs"] | None = None) -> Operation:
        """Begins to move its changes onto another generation. keep: of paths that both have changed."""
        return Operation(self._api, self._api.rebase_volume(self.name, onto=onto, keep=keep))

    def flatten(self) -> Operation:
        """Begins to make it independent of all others."""
        return Operation(self._api, self._api.flatten_volume(self.name))

    # Changes.

    def rename(self, name: str) -> None:
        """Gives it another name. If it is mounted, it stays where it is."""
        self._api.rename(ref=self.name, name=name)
        self.info = self._api.show_volume(name)

    def resize(self, size_bytes: int) -> None:
        """Enlarges it and its filesystem."""
        self._api.resize_volume(self.name, size_bytes=size_bytes)
        self.refresh()

    def set_labels(self, labels: Mapping[str, str] | None = None, *, remove: Iterable[str] = ()) -> dict[str, str]:
        """Sets labels and removes others; the rest stays. Returns all."""
        self.info = self._api.change_labels(self.name, set=labels, remove=list(remove) or None)
        return self.labels

    def pin(self, time: Seconds | None = None) -> None:
        """Keeps it from being destroyed, for some time; None: until it is unpinned."""
        self.info = self._api.pin(self.name, seconds=seconds(time))

    def unpin(self) -> None:
        """Undoes pin."""
        self.info = self._api.unpin(self.name)

    def destroy(self) -> None:
        """Destroys it with its snapshots. InUse if a process uses it, NotFound if it is gone."""
        try:
            self._api.destroy_volume(self.name)
        except Unreachable as e:
            if not e.sent:
                raise
            # Another volume may have its name by now.
            self._api.destroy_volume(self.name, id=self.id)


def _not_mounted(name: str) -> Conflict:
    detail = f"volume {name} is not mounted"
    return Conflict(Problem("urn:pando:conflict", "", 0, detail, "conflict", ref=name, hint="call mount() first"))


class Snapshot:
    """A snapshot of a volume."""

    def __init__(self, api: API, info: models.Volume | models.Info) -> None:
        self._api = api
        self.info = info

    def __repr__(self) -> str:
        return f"<pando.Snapshot {self.name}>"

    @property
    def name(self) -> str:
        """Its reference: VOLUME@SNAPSHOT."""
        return self.info.name

    @property
    def short_name(self) -> str:
        """Its name within its volume."""
        return self.name.partition("@")[2]

    def destroy(self) -> None:
        """Destroys it."""
        self._api.destroy_snapshot(self.name.partition("@")[0], self.short_name)


class Clone:
    """A clone that is made when a with statement begins, and destroyed when it ends."""

    def __init__(self, api: API, origin: str, request: dict[str, Any], *, fork: bool = False) -> None:
        self._api, self._origin, self._request, self._fork = api, origin, request, fork
        self._key = new_key()
        self._volume: Volume | None = None
        self._pid = os.getpid()

    def create(self) -> Volume:
        """Makes the clone without a with statement: it stays until it is destroyed."""
        return Volume(self._api, self._send())

    def _send(self) -> models.Volume:
        if self._fork:
            return self._api.fork_volume(self._origin, idempotency_key=self._key, **self._request)
        return self._api.clone_volume(from_=self._origin, idempotency_key=self._key, **self._request)

    def __enter__(self) -> Volume:
        _open.add(self)
        try:
            self._volume = self.create()
        except PandoError:
            _open.discard(self)
            raise
        except BaseException:
            self._undo()
            raise
        return self._volume

    def _undo(self) -> None:
        """Destroys what an interrupted request may have made: a repetition with its key says what that is."""
        try:
            self.create().destroy()
        except PandoError as e:
            log.warning("could not find out whether volume %s was made: %s", self._request["name"], e)
        _open.discard(self)

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        try:
            self._destroy()
        except PandoError as e:
            if error is None:
                raise
            # What happened in the statement matters more.
            log.warning("volume %s was not destroyed: %s", self._request["name"], e)
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"volume {self._request['name']} was not destroyed: {e}")
        finally:
            _open.discard(self)

    def _destroy(self) -> None:
        """Destroys the volume, even if the attempt is interrupted. One that is gone is fine."""
        volume = self._volume
        if volume is None or volume.kept:
            return
        try:
            with contextlib.suppress(NotFound):
                volume.destroy()
        except PandoError:
            raise
        except BaseException:
            with contextlib.suppress(NotFound):
                volume.destroy()
            raise


_open: set[Clone] = set()
"""Clones whose with statement has begun and not ended."""


def _destroy_open() -> None:
    """Destroys what an interrupt between two instructions has left, at the end of the program."""
    for clone in list(_open):
        if clone._pid == os.getpid():  # not in a child that was forked within the statement
            try:
                clone._destroy()
            except PandoError as e:
                log.warning("volume %s was not destroyed: %s", clone._request["name"], e)


atexit.register(_destroy_open)
