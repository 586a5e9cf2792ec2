"""A method for each request of the service.

Written by generate.py from api/openapi.json: do not edit it, run `make python-client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from . import models
from ._transport import Content, Stream, Transport, quote


class API:
    """The requests of the service. Arguments that are None are not sent."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def read_metrics(self) -> Stream:
        """Read metrics of the pool and the service, for Prometheus."""
        return self.transport.stream("GET", "/metrics")

    def bench_clone(
        self,
        *,
        clones: int | None = None,
        files: int | None = None,
        golden: str | None = None,
        idle_seconds: float | None = None,
        overlay: bool | None = None,
        rounds: int | None = None,
        tail_seconds: float | None = None,
        volumes: int | None = None,
    ) -> models.Operation:
        """Measure what clones cost on this pool.

        Run it on a host that does nothing else: only one measurement runs at a time. The result is the report that the
        command prints as JSON.

        clones: Clones in each series.
        files: Of a generated tree.
        golden: Golden to clone (default: a generated tree, which is imported).
        idle_seconds: Measure the neighbour alone.
        overlay: Measure overlay clones.
        rounds: Repetitions of each comparison.
        tail_seconds: Wait for writes to end.
        volumes: Then fill the pool to this.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            "/v1/benches/clone",
            body={
                "clones": clones,
                "files": files,
                "golden": golden,
                "idle_seconds": idle_seconds,
                "overlay": overlay,
                "rounds": rounds,
                "tail_seconds": tail_seconds,
                "volumes": volumes,
            },
        )

    def bench_reclaim(
        self,
        *,
        clones: int | None = None,
        files: int | None = None,
        generations: int | None = None,
        goldens: int | None = None,
        volumes: int | None = None,
        write_bytes: int | None = None,
    ) -> models.Operation:
        """Measure how much space and memory destroyed volumes return.

        Run it on a host that does nothing else: only one measurement runs at a time. The result is the report that the
        command prints as JSON.

        files: Of the tree to clone.
        generations: Of each golden.
        goldens: For gc to check.
        volumes: For gc to check.
        write_bytes: Written into each clone.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            "/v1/benches/reclaim",
            body={
                "clones": clones,
                "files": files,
                "generations": generations,
                "goldens": goldens,
                "volumes": volumes,
                "write_bytes": write_bytes,
            },
        )

    def bench_sync(
        self,
        *,
        volume: str,
        profile: str | None = None,
        quick: bool | None = None,
        runs: int | None = None,
        seconds: float | None = None,
        size_bytes: int | None = None,
    ) -> models.Operation:
        """Measure the cost of syncs in a volume, and prove that they reach the disk.

        Run it on a host that does nothing else: only one measurement runs at a time. The result is the report that the
        command prints as JSON. An operation whose verdict is FAIL is done.

        profile: Writes and syncs as this database does.
        quick: Only find out whether syncs reach the disk.
        seconds: Of each run (default: 120; 5 if quick).
        size_bytes: Of all files (default: as the profile says).
        volume: Volume to measure; it is mounted for the run.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            "/v1/benches/sync",
            body={
                "profile": profile,
                "quick": quick,
                "runs": runs,
                "seconds": seconds,
                "size_bytes": size_bytes,
                "volume": volume,
            },
        )

    def destroy(
        self,
        *,
        dry_run: bool | None = None,
        ids: Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        what: Sequence[str] | None = None,
    ) -> models.DestroyReport:
        """Destroy several volumes and snapshots.

        An unknown name destroys nothing. After that, an object that is in use does not keep the others from being
        destroyed: failed lists it. To be able to repeat the request, find the IDs first with dry_run, and send them
        with the names.

        dry_run: Only report what would be destroyed, without snapshots of volumes.
        ids: ID of each name: what is gone is left out, whatever has its name now.
        labels: Only what has these labels: KEY or KEY=VALUE, a glob.
        what: Names of volumes or globs over them, and VOLUME@SNAPSHOT.
        """
        return self.transport.json(
            models.DestroyReport,
            "POST",
            "/v1/destroy",
            body={"dry_run": dry_run, "ids": ids, "labels": labels, "what": what},
        )

    def diff(
        self, *, a: str, b: str, freeze: Literal["if_needed", "always", "never"] | None = None
    ) -> models.Difference:
        """List what differs between two volumes, snapshots or generations.

        a: What to compare: VOLUME, VOLUME@SNAPSHOT, GOLDEN or GOLDEN@N.
        b: With what.
        freeze: Stop writes to volumes in use.
        """
        return self.transport.json(models.Difference, "GET", "/v1/diff", query={"a": a, "b": b, "freeze": freeze})

    def doctor(self, *, limit_seconds: float | None = None, only: Sequence[str] | None = None) -> models.Operation:
        """Find causes of data loss, leaks and slow storage on the host.

        limit_seconds: Of each check (default: 20).
        only: Names of checks (default: all).
        """
        return self.transport.json(
            models.Operation, "POST", "/v1/doctor", body={"limit_seconds": limit_seconds, "only": only}
        )

    def follow_events(self, *, last_event_id: str | None = None, after: str | None = None) -> Stream:
        """Follow what happens in the pool.

        Server-sent events, also of what other processes do with the pool: the data of each is an event as in
        /v1/history. Without Last-Event-ID the stream begins now. The event gap says that events are missing between the
        one before and the one after it, because they are no longer known. Comments keep the connection alive.

        last_event_id: ID of the last event that was received: continue after it.
        after: The same, in place of the header; 0: from the oldest event that is known.
        """
        return self.transport.stream(
            "GET", "/v1/events", query={"after": after}, headers={"Last-Event-ID": last_event_id}
        )

    def export(
        self,
        ref: str,
        *,
        format: Literal["tar", "tar.zst", "raw", "qcow2"] | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
    ) -> Stream:
        """Export the files or the image of a volume, snapshot or generation.

        If it fails after it has begun, the connection is closed before the end of the body, which clients must notice.

        freeze: Stop writes to a volume in use.
        """
        return self.transport.stream("GET", f"/v1/exports/{quote(ref)}", query={"format": format, "freeze": freeze})

    def fsck(self, *, refs: Sequence[str] | None = None, repair: bool | None = None) -> models.Operation:
        """Check the pool, its catalogue, and the filesystems in images.

        An operation that has found problems is done; ok in its result is then false.

        refs: Objects to check (default: all).
        repair: Repair what is found.
        """
        return self.transport.json(models.Operation, "POST", "/v1/fsck", body={"refs": refs, "repair": repair})

    def gc(self, *, explain: bool | None = None) -> models.Operation:
        """Remove what is left of destroyed objects and interrupted operations.

        explain: Also report what is kept, and why.
        """
        return self.transport.json(models.Operation, "POST", "/v1/gc", body={"explain": explain})

    def list_goldens(self) -> models.GoldenList:
        """List goldens, each with its current generation."""
        return self.transport.json(models.GoldenList, "GET", "/v1/goldens")

    def remove_golden(self, golden: str, *, if_match: str | None = None) -> None:
        """Remove a golden with all its generations.

        Volumes that were cloned from it are not affected.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        """
        self.transport.nothing("DELETE", f"/v1/goldens/{quote(golden)}", headers={"If-Match": if_match})

    def show_golden(self, golden: str) -> models.Details:
        """Show a golden with its generations."""
        return self.transport.json(models.Details, "GET", f"/v1/goldens/{quote(golden)}")

    def set_golden(
        self,
        golden: str,
        *,
        if_match: str | None = None,
        keep: int | None = None,
        overlay: Literal["never", "default", "allowed"] | None = None,
    ) -> models.GoldenSet:
        """Set properties of a golden.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        keep: Keep the newest generations, this many; 0: all.
        overlay: Whether clones are overlays.
        """
        return self.transport.json(
            models.GoldenSet,
            "PATCH",
            f"/v1/goldens/{quote(golden)}",
            headers={"If-Match": if_match},
            body={"keep": keep, "overlay": overlay},
        )

    def remove_generation(self, golden: str, number: int, *, if_match: str | None = None) -> None:
        """Remove a generation that is not the current one.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        """
        self.transport.nothing(
            "DELETE", f"/v1/goldens/{quote(golden)}/generations/{quote(number)}", headers={"If-Match": if_match}
        )

    def import_golden(
        self,
        golden: str,
        content: Content,
        *,
        idempotency_key: str | None = None,
        update: bool | None = None,
        fs: Literal["native", "ext4", "xfs"] | None = None,
        size_bytes: int | None = None,
        keep: int | None = None,
        overlay: Literal["never", "default", "allowed"] | None = None,
        preset: str | None = None,
        label: Sequence[str] | None = None,
    ) -> models.ImportedGolden:
        """Make a golden from a tar archive.

        The answer comes when the golden is durable; until then it is in the list of operations. If the client goes
        away, nothing of it stays. A repetition with the same Idempotency-Key must have the same parameters; its body is
        not read.

        idempotency_key: Name of the request: a repetition returns what it made.
        update: Make the next generation of a golden that exists.
        fs: Filesystem of the volume (default: as the driver prefers).
        size_bytes: Size of the volume (default: large enough).
        keep: From now on, keep this many of the newest generations.
        overlay: From now on, whether clones are overlays.
        preset: Name of a preset.
        label: Label of the golden, KEY=VALUE (Repeatable).
        """
        return self.transport.json(
            models.ImportedGolden,
            "POST",
            f"/v1/goldens/{quote(golden)}/import",
            query={
                "update": update,
                "fs": fs,
                "size_bytes": size_bytes,
                "keep": keep,
                "overlay": overlay,
                "preset": preset,
                "label": label,
            },
            headers={"Idempotency-Key": idempotency_key},
            content=content,
        )

    def publish_golden(
        self,
        golden: str,
        *,
        volume: str,
        idempotency_key: str | None = None,
        force: bool | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
        keep: int | None = None,
        labels: Mapping[str, str] | None = None,
        overlay: Literal["never", "default", "allowed"] | None = None,
        preset: str | None = None,
    ) -> models.Operation:
        """Make the next generation of a golden from a volume.

        The golden is created if it does not exist. The volume stays, and may be in use.

        idempotency_key: Name of the request: a repetition returns what it made.
        force: Publish even if the volume is based on an older generation.
        freeze: Stop writes to a volume in use.
        keep: From now on, newest generations to keep; 0: all.
        labels: Of the golden, in addition to those that it has.
        overlay: Whether clones are overlays.
        preset: Name of rules for what to leave out.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            f"/v1/goldens/{quote(golden)}/publish",
            headers={"Idempotency-Key": idempotency_key},
            body={
                "force": force,
                "freeze": freeze,
                "keep": keep,
                "labels": labels,
                "overlay": overlay,
                "preset": preset,
                "volume": volume,
            },
        )

    def list_events(
        self, *, ref: str | None = None, since: datetime | None = None, limit: int | None = None
    ) -> models.EventList:
        """List who did what, the oldest event first.

        ref: Only events of what had this name: VOLUME, GOLDEN, VOLUME@SNAPSHOT or GOLDEN@N.
        since: Only events since this time.
        limit: Only the newest ones.
        """
        return self.transport.json(
            models.EventList, "GET", "/v1/history", query={"ref": ref, "since": since, "limit": limit}
        )

    def show_labels(self, ref: str) -> models.Labels:
        """Show the labels of a volume, snapshot or golden."""
        return self.transport.json(models.Labels, "GET", f"/v1/labels/{quote(ref)}")

    def change_labels(
        self,
        ref: str,
        *,
        if_match: str | None = None,
        remove: Sequence[str] | None = None,
        set: Mapping[str, str] | None = None,
    ) -> models.Volume:
        """Change labels of a volume, snapshot or golden, all at once.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        remove: Keys; those that it does not have are ignored.
        """
        return self.transport.json(
            models.Volume,
            "PATCH",
            f"/v1/labels/{quote(ref)}",
            headers={"If-Match": if_match},
            body={"remove": remove, "set": set},
        )

    def show_lineage(self) -> models.Lineage:
        """Add up volumes and snapshots by the generation that they descend from.

        Bytes are those that were last measured.
        """
        return self.transport.json(models.Lineage, "GET", "/v1/lineage")

    def show_object(self, ref: str) -> models.Details:
        """Show a volume, snapshot or generation, measured now, whatever a reference names."""
        return self.transport.json(models.Details, "GET", f"/v1/objects/{quote(ref)}")

    def list_operations(self) -> models.OperationList:
        """List operations that run or have ended, the newest first.

        They are kept in memory: after a restart of the service there are none. What they were doing is then undone or
        finished as after a command that was killed. Results are left out.
        """
        return self.transport.json(models.OperationList, "GET", "/v1/operations")

    def cancel_operation(self, id: str) -> models.Operation:
        """Cancel an operation.

        It undoes what it did, and ends as canceled. One that has ended stays as it is.
        """
        return self.transport.json(models.Operation, "DELETE", f"/v1/operations/{quote(id)}")

    def show_operation(self, id: str) -> models.Operation:
        """Show an operation."""
        return self.transport.json(models.Operation, "GET", f"/v1/operations/{quote(id)}")

    def wait_operation(self, id: str, *, timeout_seconds: float | None = None) -> models.Operation:
        """Wait for the end of an operation.

        Answers with the operation when it ends, or as it is after the timeout.
        """
        return self.transport.json(
            models.Operation, "GET", f"/v1/operations/{quote(id)}/wait", query={"timeout_seconds": timeout_seconds}
        )

    def unpin(self, ref: str, *, if_match: str | None = None) -> models.Volume:
        """Undo a pin.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        """
        return self.transport.json(models.Volume, "DELETE", f"/v1/pins/{quote(ref)}", headers={"If-Match": if_match})

    def pin(self, ref: str, *, if_match: str | None = None, seconds: float | None = None) -> models.Volume:
        """Keep a volume, snapshot or generation from being destroyed.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        seconds: Default: until it is unpinned.
        """
        return self.transport.json(
            models.Volume, "PUT", f"/v1/pins/{quote(ref)}", headers={"If-Match": if_match}, body={"seconds": seconds}
        )

    def show_pool(self, *, exact: bool | None = None) -> models.PoolInfo:
        """Show the pool and its space.

        exact: Measure every object now, which takes long.
        """
        return self.transport.json(models.PoolInfo, "GET", "/v1/pool", query={"exact": exact})

    def show_space(self) -> models.SpaceHistory:
        """Show the space of the pool over the last day.

        A point for each minute since the service started. Long times have fewer points, each the highest of its time.
        """
        return self.transport.json(models.SpaceHistory, "GET", "/v1/pool/space")

    def prune(
        self,
        *,
        dry_run: bool | None = None,
        idle_seconds: float | None = None,
        keep_free_percent: float | None = None,
        labels: Sequence[str] | None = None,
        older_than_seconds: float | None = None,
    ) -> models.Operation:
        """Remove volumes and generations that are no longer needed.

        dry_run: Only report what would be removed.
        idle_seconds: Only what is idle longer.
        keep_free_percent: Stop when this is free.
        labels: Only what has these labels: KEY or KEY=VALUE.
        older_than_seconds: Only what is older.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            "/v1/prune",
            body={
                "dry_run": dry_run,
                "idle_seconds": idle_seconds,
                "keep_free_percent": keep_free_percent,
                "labels": labels,
                "older_than_seconds": older_than_seconds,
            },
        )

    def list_remains(self) -> models.RemainsList:
        """List what still takes space although it was destroyed, and why, the largest first."""
        return self.transport.json(models.RemainsList, "GET", "/v1/remains")

    def list_remotes(self) -> models.RemoteList:
        """List the remotes of the pool.

        They are added on the host, with pando remote add.
        """
        return self.transport.json(models.RemoteList, "GET", "/v1/remotes")

    def prune_remote(
        self,
        remote: str,
        *,
        accept_rollback: bool | None = None,
        dry_run: bool | None = None,
        keep_daily: int | None = None,
        keep_hourly: int | None = None,
        keep_last: int | None = None,
        keep_monthly: int | None = None,
        keep_weekly: int | None = None,
        keep_within_seconds: float | None = None,
        keep_yearly: int | None = None,
        max_repack: int | None = None,
        names: Sequence[str] | None = None,
    ) -> models.Operation:
        """Remove old points from a remote, and return their space.

        accept_rollback: Continue if the remote was restored to an older state.
        dry_run: Only report what would be removed.
        keep_hourly: And the newest of this many hours with points.
        keep_last: Keep this many of the newest points.
        keep_within_seconds: And all newer than this.
        max_repack: Bytes to rewrite at most (default: no limit).
        names: Volumes that the rules apply to (default: all).
        """
        return self.transport.json(
            models.Operation,
            "POST",
            f"/v1/remotes/{quote(remote)}/prune",
            body={
                "accept_rollback": accept_rollback,
                "dry_run": dry_run,
                "keep_daily": keep_daily,
                "keep_hourly": keep_hourly,
                "keep_last": keep_last,
                "keep_monthly": keep_monthly,
                "keep_weekly": keep_weekly,
                "keep_within_seconds": keep_within_seconds,
                "keep_yearly": keep_yearly,
                "max_repack": max_repack,
                "names": names,
            },
        )

    def pull(
        self,
        remote: str,
        *,
        ref: str,
        as_: str | None = None,
        limit_rate: int | None = None,
        no_origin: bool | None = None,
        take_over: bool | None = None,
        update: bool | None = None,
    ) -> models.Operation:
        """Restore a volume or golden from a remote.

        as_: Name in this pool (default: that on the remote).
        limit_rate: Bytes a second; 0: no limit.
        no_origin: Do not restore a missing origin.
        ref: NAME, VOLUME@SNAPSHOT or GOLDEN@N on the remote.
        take_over: Make this pool the writer of the volume on the remote.
        update: Bring a volume that was pulled before to its newest point.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            f"/v1/remotes/{quote(remote)}/pull",
            body={
                "as": as_,
                "limit_rate": limit_rate,
                "no_origin": no_origin,
                "ref": ref,
                "take_over": take_over,
                "update": update,
            },
        )

    def push(
        self,
        remote: str,
        *,
        accept_rollback: bool | None = None,
        all: bool | None = None,
        as_: str | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
        full: bool | None = None,
        limit_rate: int | None = None,
        no_origin: bool | None = None,
        portable: bool | None = None,
        refs: Sequence[str] | None = None,
    ) -> models.Operation:
        """Push volumes and goldens to a remote.

        The result of one that failed has what was pushed nevertheless, and why the rest was not.

        accept_rollback: Continue if the remote was restored to an older state.
        all: Push every golden, and every volume that is not ephemeral.
        as_: Name on the remote, of a single ref.
        freeze: Stop writes to volumes in use.
        full: Send all data again.
        limit_rate: Bytes a second; 0: no limit.
        no_origin: Do not push the origin of a clone first.
        portable: Send trees in the form that all drivers can read.
        refs: Volumes, snapshots, generations and goldens.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            f"/v1/remotes/{quote(remote)}/push",
            body={
                "accept_rollback": accept_rollback,
                "all": all,
                "as": as_,
                "freeze": freeze,
                "full": full,
                "limit_rate": limit_rate,
                "no_origin": no_origin,
                "portable": portable,
                "refs": refs,
            },
        )

    def verify(
        self,
        remote: str,
        *,
        names: Sequence[str] | None = None,
        read_percent: float | None = None,
        repair: bool | None = None,
    ) -> models.Operation:
        """Check the data on a remote.

        An operation that has found problems is done; total_problems in its result says how many.

        names: Volumes and goldens (default: all).
        read_percent: Also read this part of the data.
        repair: Send missing and damaged data again, if this pool has it.
        """
        return self.transport.json(
            models.Operation,
            "POST",
            f"/v1/remotes/{quote(remote)}/verify",
            body={"names": names, "read_percent": read_percent, "repair": repair},
        )

    def list_remote(self, remote: str) -> models.RemoteVolumes:
        """List the volumes and goldens on a remote, each with its newest point."""
        return self.transport.json(models.RemoteVolumes, "GET", f"/v1/remotes/{quote(remote)}/volumes")

    def rename(self, *, name: str, ref: str, if_match: str | None = None) -> models.RenamedObject:
        """Give a volume, snapshot or golden another name.

        A volume may be mounted, and stays where it is.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        name: Its new name; of a snapshot: within its volume.
        ref: VOLUME, GOLDEN or VOLUME@SNAPSHOT.
        """
        return self.transport.json(
            models.RenamedObject, "POST", "/v1/rename", headers={"If-Match": if_match}, body={"name": name, "ref": ref}
        )

    def cancel_request(self, key: str) -> None:
        """Cancel a request of yours that makes something, by its Idempotency-Key.

        The request undoes what it did and is answered with canceled, or with what it made if it was done already.
        Without a request with this key that is running, this does nothing.
        """
        self.transport.nothing("DELETE", f"/v1/requests/{quote(key)}")

    def show_service(self) -> models.Status:
        """Show the service, its pool, and who asks."""
        return self.transport.json(models.Status, "GET", "/v1/service")

    def create_snapshot_group(
        self,
        *,
        volumes: Sequence[str],
        idempotency_key: str | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> models.SnapshotGroup:
        """Take snapshots of several volumes at one point in time.

        idempotency_key: Name of the request: a repetition returns what it made.
        freeze: Stop writes to a volume in use.
        name: Name of the snapshot (default: the time, in UTC).
        """
        return self.transport.json(
            models.SnapshotGroup,
            "POST",
            "/v1/snapshot-groups",
            headers={"Idempotency-Key": idempotency_key},
            body={"freeze": freeze, "labels": labels, "name": name, "volumes": volumes},
        )

    def list_tasks(self) -> models.TaskList:
        """List what the service does by itself, and what came of it.

        Tasks are set in a file on the host. Runs that take longer are operations while they run, begun by "task NAME".
        """
        return self.transport.json(models.TaskList, "GET", "/v1/tasks")

    def list_volumes(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        label: Sequence[str] | None = None,
        golden: str | None = None,
        name: str | None = None,
        state: Literal["idle", "mounted"] | None = None,
        measure: Literal["some", "all"] | None = None,
    ) -> models.VolumePage:
        """List volumes.

        In the order of their names. Sizes are those that were last measured, unless measure is set; a volume by itself
        is measured now.

        after: List the volumes after this name: the field next of the page before.
        limit: Length of the page.
        label: Only volumes with the label KEY or KEY=VALUE, a glob (Repeatable).
        golden: Only volumes that descend from this golden, or from GOLDEN@N.
        name: Only volumes with a name that matches this glob.
        state: Only volumes in this state.
        measure: Measure now: if volumes are few (some), or in any case (all).
        """
        return self.transport.json(
            models.VolumePage,
            "GET",
            "/v1/volumes",
            query={
                "after": after,
                "limit": limit,
                "label": label,
                "golden": golden,
                "name": name,
                "state": state,
                "measure": measure,
            },
        )

    def clone_volume(
        self,
        *,
        from_: str,
        name: str,
        idempotency_key: str | None = None,
        dev: bool | None = None,
        ephemeral: bool | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
        labels: Mapping[str, str] | None = None,
        mount: bool | None = None,
        mount_dir: str | None = None,
        overlay: bool | None = None,
        owner: models.Owner | None = None,
        size_bytes: int | None = None,
        suid: bool | None = None,
        ttl_seconds: float | None = None,
    ) -> models.Volume:
        """Create a volume from a golden, a snapshot or a volume.

        Answers 200 instead of 201 if the request repeats one with the same Idempotency-Key.

        idempotency_key: Name of the request: a repetition returns what it made.
        dev: Devices in it work.
        ephemeral: Do not wait for the disk: it does not survive a reboot.
        freeze: Stop writes to the origin.
        from_: What to clone: GOLDEN, GOLDEN@N, VOLUME@SNAPSHOT or VOLUME.
        mount: Mount it, too.
        mount_dir: Where, an absolute path (default: below the pool).
        name: Name of the new volume.
        overlay: Hold only what differs from the golden (default: as the golden says).
        owner: Gets the volume; its mount shows root's files as this user's.
        size_bytes: Size to grow it to (default: as the origin).
        suid: Set-user-ID programs in it work.
        ttl_seconds: Destroy it after this time.
        """
        return self.transport.json(
            models.Volume,
            "POST",
            "/v1/volumes",
            headers={"Idempotency-Key": idempotency_key},
            body={
                "dev": dev,
                "ephemeral": ephemeral,
                "freeze": freeze,
                "from": from_,
                "labels": labels,
                "mount": mount,
                "mount_dir": mount_dir,
                "name": name,
                "overlay": overlay,
                "owner": owner,
                "size_bytes": size_bytes,
                "suid": suid,
                "ttl_seconds": ttl_seconds,
            },
        )

    def destroy_volume(self, volume: str, *, if_match: str | None = None, id: str | None = None) -> None:
        """Destroy a volume with its snapshots.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        id: Its ID: if it no longer exists, this succeeds, whatever has its name now.
        """
        self.transport.nothing(
            "DELETE", f"/v1/volumes/{quote(volume)}", query={"id": id}, headers={"If-Match": if_match}
        )

    def show_volume(self, volume: str) -> models.Details:
        """Show a volume with its snapshots, measured now."""
        return self.transport.json(models.Details, "GET", f"/v1/volumes/{quote(volume)}")

    def flatten_volume(self, volume: str) -> models.Operation:
        """Make a volume independent of all others."""
        return self.transport.json(models.Operation, "POST", f"/v1/volumes/{quote(volume)}/flatten")

    def fork_volume(
        self,
        volume: str,
        *,
        name: str,
        idempotency_key: str | None = None,
        dev: bool | None = None,
        ephemeral: bool | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
        labels: Mapping[str, str] | None = None,
        mount: bool | None = None,
        mount_dir: str | None = None,
        owner: models.Owner | None = None,
        size_bytes: int | None = None,
        suid: bool | None = None,
        ttl_seconds: float | None = None,
    ) -> models.Volume:
        """Create a volume from another one, which may be in use.

        idempotency_key: Name of the request: a repetition returns what it made.
        dev: Devices in it work.
        ephemeral: Do not wait for the disk: it does not survive a reboot.
        freeze: Stop writes to the origin.
        mount: Mount it, too.
        mount_dir: Where, an absolute path (default: below the pool).
        name: Name of the new volume.
        owner: Gets the volume; its mount shows root's files as this user's.
        size_bytes: Size to grow it to (default: as the origin).
        suid: Set-user-ID programs in it work.
        ttl_seconds: Destroy it after this time.
        """
        return self.transport.json(
            models.Volume,
            "POST",
            f"/v1/volumes/{quote(volume)}/fork",
            headers={"Idempotency-Key": idempotency_key},
            body={
                "dev": dev,
                "ephemeral": ephemeral,
                "freeze": freeze,
                "labels": labels,
                "mount": mount,
                "mount_dir": mount_dir,
                "name": name,
                "owner": owner,
                "size_bytes": size_bytes,
                "suid": suid,
                "ttl_seconds": ttl_seconds,
            },
        )

    def watch_volume(self, volume: str, *, interval_seconds: float | None = None) -> Stream:
        """Follow what a volume writes, and how long its syncs take.

        Server-sent events called sample: the data of each is what was measured in an interval. A volume that is not
        mounted has samples that say so.

        interval_seconds: Length of the intervals.
        """
        return self.transport.stream(
            "GET", f"/v1/volumes/{quote(volume)}/iostat", query={"interval_seconds": interval_seconds}
        )

    def mount_volume(
        self, volume: str, *, dev: bool | None = None, dir: str | None = None, suid: bool | None = None
    ) -> models.Volume:
        """Mount a volume.

        Does nothing if it is mounted there already.

        dev: Devices in it work.
        dir: Absolute path of the mount point (default: below the pool).
        suid: Set-user-ID programs in it work.
        """
        return self.transport.json(
            models.Volume, "POST", f"/v1/volumes/{quote(volume)}/mount", body={"dev": dev, "dir": dir, "suid": suid}
        )

    def rebase_volume(
        self, volume: str, *, onto: str, keep: Literal["ours", "theirs"] | None = None
    ) -> models.Operation:
        """Move a volume's own changes onto another generation of its golden.

        keep: Of paths that both have changed (default: fail).
        onto: GOLDEN or GOLDEN@N.
        """
        return self.transport.json(
            models.Operation, "POST", f"/v1/volumes/{quote(volume)}/rebase", body={"keep": keep, "onto": onto}
        )

    def resize_volume(self, volume: str, *, size_bytes: int) -> models.ResizedVolume:
        """Enlarge a volume and its filesystem."""
        return self.transport.json(
            models.ResizedVolume, "POST", f"/v1/volumes/{quote(volume)}/resize", body={"size_bytes": size_bytes}
        )

    def rewind_volume(self, volume: str, *, snapshot: str, detach: bool | None = None) -> models.RewoundVolume:
        """Restore a volume to one of its snapshots.

        Its previous state stays as a snapshot.

        detach: Unmount the volume first, and mount it again in the same place.
        """
        return self.transport.json(
            models.RewoundVolume,
            "POST",
            f"/v1/volumes/{quote(volume)}/rewind",
            body={"detach": detach, "snapshot": snapshot},
        )

    def list_snapshots(self, volume: str) -> models.SnapshotList:
        """List the snapshots of a volume, the oldest first."""
        return self.transport.json(models.SnapshotList, "GET", f"/v1/volumes/{quote(volume)}/snapshots")

    def create_snapshot(
        self,
        volume: str,
        *,
        idempotency_key: str | None = None,
        freeze: Literal["if_needed", "always", "never"] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> models.Volume:
        """Take a snapshot of a volume, which may be in use.

        Answers 200 instead of 201 if the request repeats one with the same Idempotency-Key.

        idempotency_key: Name of the request: a repetition returns what it made.
        freeze: Stop writes to a volume in use.
        name: Name of the snapshot (default: the time, in UTC).
        """
        return self.transport.json(
            models.Volume,
            "POST",
            f"/v1/volumes/{quote(volume)}/snapshots",
            headers={"Idempotency-Key": idempotency_key},
            body={"freeze": freeze, "labels": labels, "name": name},
        )

    def destroy_snapshot(
        self, volume: str, snapshot: str, *, if_match: str | None = None, id: str | None = None
    ) -> None:
        """Destroy a snapshot.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        id: Its ID: if it no longer exists, this succeeds, whatever has its name now.
        """
        self.transport.nothing(
            "DELETE",
            f"/v1/volumes/{quote(volume)}/snapshots/{quote(snapshot)}",
            query={"id": id},
            headers={"If-Match": if_match},
        )

    def show_snapshot(self, volume: str, snapshot: str) -> models.Details:
        """Show a snapshot, measured now."""
        return self.transport.json(models.Details, "GET", f"/v1/volumes/{quote(volume)}/snapshots/{quote(snapshot)}")

    def set_ttl(self, volume: str, *, if_match: str | None = None, seconds: float | None = None) -> models.Volume:
        """Set when a volume expires, in place of what was set before.

        A volume that is in use when it expires is destroyed when it no longer is.

        if_match: ETag of the object as it was read: if it has changed, nothing is done (412).
        seconds: From now on; 0 or missing: never.
        """
        return self.transport.json(
            models.Volume,
            "PUT",
            f"/v1/volumes/{quote(volume)}/ttl",
            headers={"If-Match": if_match},
            body={"seconds": seconds},
        )

    def unmount_volume(self, volume: str) -> models.Volume:
        """Unmount a volume."""
        return self.transport.json(models.Volume, "POST", f"/v1/volumes/{quote(volume)}/unmount")

    def open_web(self) -> models.WebLogin:
        """Get a URL of the web page that works once, with the rights of the caller."""
        return self.transport.json(models.WebLogin, "POST", "/v1/web/logins")
