"""The client."""

from __future__ import annotations

import io
import os
import ssl
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from . import models
from ._api import API
from ._transport import Transport
from .events import Event, follow
from .operations import Operation
from .volume import Clone, Freeze, Seconds, Volume, new_key, new_name, seconds

Archive = bytes | str | os.PathLike[str] | IO[bytes]
"""A tar archive, plain or compressed by gzip or zstd (bytes, path or open file), or the path of a directory."""


class Client:
    """A client of a service. Threads may share it.

    api has a method for each request of the service; the methods here are for what programs mostly do.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        url: str | None = None,
        token: str | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        timeout: float | None = None,
        patience: float = 10.0,
    ) -> None:
        path = os.fspath(socket) if socket is not None else None
        self._transport = Transport(
            socket_path=path, url=url, token=token, ssl_context=ssl_context, timeout=timeout, patience=patience
        )
        self.api = API(self._transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes idle connections. The client can still be used."""
        self._transport.close()

    def service(self) -> models.Status:
        """Returns what the service says about itself, and who this client is to it."""
        return self.api.show_service()

    def pool(self) -> models.PoolInfo:
        """Returns the pool and its space."""
        return self.api.show_pool()

    # Volumes.

    def clone(
        self,
        origin: str,
        name: str | None = None,
        *,
        mount: bool = True,
        ttl: Seconds | None = None,
        labels: Mapping[str, str] | None = None,
        overlay: bool | None = None,
        size_bytes: int | None = None,
        ephemeral: bool = False,
        mount_dir: str | os.PathLike[str] | None = None,
        owner: models.Owner | None = None,
        dev: bool = False,
        suid: bool = False,
        freeze: Freeze | None = None,
    ) -> Clone:
        """Returns a clone of a golden, a snapshot or a volume that lasts as long as a with statement.

        Without a name it gets one that no other volume has. ttl is how long it lasts at most, in seconds, even if this
        program is killed. overlay: it holds only what differs from the golden; None: as the golden says. ephemeral: it
        is not durable. mount_dir: where to mount it, in place of a directory below the pool. dev, suid: devices and
        set-user-ID programs in it work. create() makes it without a with statement.
        """
        request: dict[str, Any] = {
            "name": name or new_name(origin),
            "mount": mount,
            "ttl_seconds": seconds(ttl),
            "labels": labels,
            "overlay": overlay,
            "size_bytes": size_bytes,
            "ephemeral": ephemeral or None,
            "mount_dir": os.fspath(mount_dir) if mount_dir is not None else None,
            "owner": owner,
            "dev": dev or None,
            "suid": suid or None,
            "freeze": freeze,
        }
        return Clone(self.api, origin, request)

    def volume(self, name: str) -> Volume:
        """Returns a volume. NotFound."""
        return Volume(self.api, self.api.show_volume(name))

    def volumes(self, *, labels: Sequence[str] = (), golden: str | None = None, page: int = 1000) -> Iterator[Volume]:
        """Yields volumes in the order of their names: with labels KEY or KEY=VALUE, or that descend from a golden."""
        after: str | None = None
        while True:
            found = self.api.list_volumes(after=after, limit=page, label=list(labels) or None, golden=golden)
            for info in found.items:
                yield Volume(self.api, info)
            if not found.next:
                return
            after = found.next

    def destroy(self, *what: str, labels: Sequence[str] = ()) -> models.DestroyReport:
        """Destroys volumes by name or glob, and snapshots; with labels only those that have them.

        What an attempt whose answer was lost has destroyed is missing in the report.
        """
        chosen = list(labels) or None
        found = self.api.destroy(what=list(what) or None, labels=chosen, dry_run=True).destroyed
        return self.api.destroy(what=[o.ref for o in found], ids=[o.id for o in found], labels=chosen)

    def snapshot_group(
        self,
        volumes: Sequence[str],
        name: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        freeze: Freeze | None = None,
    ) -> models.SnapshotGroup:
        """Takes snapshots of several volumes at one point in time."""
        return self.api.create_snapshot_group(
            volumes=list(volumes), name=name, labels=labels, freeze=freeze, idempotency_key=new_key()
        )

    def diff(self, a: str, b: str) -> models.Difference:
        """Lists what differs between two volumes, snapshots or generations."""
        return self.api.diff(a=a, b=b)

    # Goldens.

    def goldens(self) -> list[models.GoldenInfo]:
        """Lists goldens, each with its current generation."""
        return self.api.list_goldens().items

    def golden(self, name: str) -> models.Details:
        """Returns a golden with its generations. NotFound."""
        return self.api.show_golden(name)

    def import_golden(
        self,
        name: str,
        archive: Archive,
        *,
        update: bool = False,
        fs: Literal["native", "ext4", "xfs"] | None = None,
        size_bytes: int | None = None,
        keep: int | None = None,
        overlay: Literal["never", "default", "allowed"] | None = None,
        preset: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> models.ImportedGolden:
        """Makes a golden from a tar archive or a directory, or with update the next generation of one that exists.

        It returns when the golden is durable. See docs/goldens.md for the other arguments.
        """
        with _opened(archive) as content:
            return self.api.import_golden(
                name,
                content,
                update=update or None,
                fs=fs,
                size_bytes=size_bytes,
                keep=keep,
                overlay=overlay,
                preset=preset,
                label=[f"{k}={v}" for k, v in (labels or {}).items()] or None,
                idempotency_key=new_key(),
            )

    def remove_golden(self, name: str) -> None:
        """Removes a golden with all its generations. Clones of it are not affected."""
        self.api.remove_golden(name)

    # Operations.

    def operations(self) -> list[Operation]:
        """Lists operations that run or have ended, the newest first."""
        return [Operation(self.api, o) for o in self.api.list_operations().items]

    def operation(self, id: str) -> Operation:
        """Returns an operation. NotFound."""
        return Operation(self.api, self.api.show_operation(id))

    def push(self, remote: str, *refs: str, **options: Any) -> Operation:
        """Begins to push volumes and goldens to a remote. The options are those of api.push."""
        return Operation(self.api, self.api.push(remote, refs=list(refs) or None, **options))

    def pull(self, remote: str, ref: str, **options: Any) -> Operation:
        """Begins to restore a volume or golden from a remote. The options are those of api.pull."""
        return Operation(self.api, self.api.pull(remote, ref=ref, **options))

    def verify(self, remote: str, *names: str, **options: Any) -> Operation:
        """Begins to check the data on a remote. The options are those of api.verify."""
        return Operation(self.api, self.api.verify(remote, names=list(names) or None, **options))

    def prune(self, **options: Any) -> Operation:
        """Begins to remove what is no longer needed. The options are those of api.prune."""
        return Operation(self.api, self.api.prune(**options))

    def gc(self) -> Operation:
        """Begins to remove what is left of destroyed objects and interrupted operations."""
        return Operation(self.api, self.api.gc())

    def fsck(self, *refs: str, repair: bool = False) -> Operation:
        """Begins to check the pool, or only some volumes and goldens."""
        return Operation(self.api, self.api.fsck(refs=list(refs) or None, repair=repair or None))

    def doctor(self, *only: str) -> Operation:
        """Begins to look for causes of data loss, leaks and slow storage on the host."""
        return Operation(self.api, self.api.doctor(only=list(only) or None))

    # Events.

    def events(self, after: str | None = None) -> Iterator[Event]:
        """Yields what happens in the pool, whoever does it: after the event with an ID, or from now on.

        "0" begins with the oldest event that is known. When the connection is lost or the service restarts, it
        continues where it was. An event with gap says that events are missing.
        """
        return follow(self._transport, after)

    def history(
        self, ref: str | None = None, *, since: datetime | None = None, limit: int | None = None
    ) -> list[models.Event]:
        """Lists who did what, the oldest event first."""
        return self.api.list_events(ref=ref, since=since, limit=limit).items


class _opened:
    """The content of an archive while it is sent."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.file: IO[bytes] | None = None

    def __enter__(self) -> bytes | IO[bytes]:
        if isinstance(self.archive, bytes):
            return self.archive
        if not isinstance(self.archive, (str, os.PathLike)):
            return self.archive
        path = Path(self.archive)
        self.file = _packed(path) if path.is_dir() else path.open("rb")
        return self.file

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


def _packed(directory: Path) -> IO[bytes]:
    """Returns an archive of a directory, in a temporary file: whole before anything is sent."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.add(directory, arcname=".")
        file.seek(0, io.SEEK_SET)
    except BaseException:
        file.close()
        raise
    return file
