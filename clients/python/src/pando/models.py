"""What the service answers.

Written by generate.py from api/openapi.json: do not edit it, run `make python-client`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .errors import Problem


@dataclass(frozen=True, kw_only=True)
class DestroyReport:
    """DestroyReport of the API."""

    destroyed: list[Destroyed]
    failed: list[Problem]
    """One for each object that still exists."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Destroyed:
    """Destroyed of the API."""

    exclusive_bytes: int
    held_by: str | None = None
    id: str
    kind: str
    reclaimed: bool
    ref: str


@dataclass(frozen=True, kw_only=True)
class Details:
    """Details of the API."""

    base: str
    build_key: str | None = None
    clone_cost: str
    consistency: str
    created_at: datetime
    driver: str
    durable: bool
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    generations: list[Info] = field(default_factory=list)
    golden: str
    held: bool | None = None
    id: str
    keep: int | None = None
    key: Key | None = None
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    layers: Layers | None = None
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    origin: str
    origin_id: str
    overlay: bool
    overlay_policy: str | None = None
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    snapshots: list[Info] = field(default_factory=list)
    source: Any = None
    stall_seconds: float | None = None
    state: str
    tied_bytes: int | None = None
    etag: str = field(default="", compare=False)
    """For if_match of a later change."""


@dataclass(frozen=True, kw_only=True)
class DiffChange:
    """DiffChange of the API."""

    changed_bytes: int
    content: bool
    from_: str | None = None
    link: str | None = None
    metadata: bool
    op: str
    path: str
    size_after: int
    size_before: int
    type: str
    type_before: str | None = None


@dataclass(frozen=True, kw_only=True)
class DiffCost:
    """DiffCost of the API."""

    bytes_read: int
    directories_read: int
    files_read: int
    inodes_asked: int


@dataclass(frozen=True, kw_only=True)
class DiffRange:
    """DiffRange of the API."""

    length: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class DiffStat:
    """DiffStat of the API."""

    added: int
    changed_bytes: int
    deleted: int
    modified: int
    renamed: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of the API."""

    a: str
    b: str
    changes: list[DiffChange] = field(default_factory=list)
    cost: DiffCost
    method: str
    ranges: list[DiffRange] = field(default_factory=list)
    stat: DiffStat


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event of the API."""

    command: str | None = None
    for_uid: int | None = None
    for_user: str | None = None
    id: str | None = None
    kind: str
    lineage: str | None = None
    login_uid: int | None = None
    login_user: str | None = None
    mountpoint: str | None = None
    name: str
    name_before: str | None = None
    origin: str | None = None
    owner_uid: int | None = None
    pid: int
    remote: str | None = None
    size_bytes: int | None = None
    sudo_uid: int | None = None
    sudo_user: str | None = None
    time: datetime
    uid: int
    until: datetime | None = None
    user: str | None = None
    verb: str
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class EventList:
    """EventList of the API."""

    items: list[Event]
    more: bool
    """There are older ones."""


@dataclass(frozen=True, kw_only=True)
class GoldenInfo:
    """GoldenInfo of the API."""

    build_key: str | None = None
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    generations: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    origin: str
    overlay: bool
    overlay_policy: str
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    source: Any = None
    state: str
    volumes: int


@dataclass(frozen=True, kw_only=True)
class GoldenList:
    """GoldenList of the API."""

    items: list[GoldenInfo]


@dataclass(frozen=True, kw_only=True)
class GoldenSet:
    """GoldenSet of the API."""

    golden: str
    keep: int
    overlay_policy: str
    removed: list[str]
    """Generations that the golden no longer keeps."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ImportedGolden:
    """ImportedGolden of the API."""

    aside: str | None = None
    build_key: str | None = None
    bytes: int | None = None
    changed: int | None = None
    cleaned: list[str] = field(default_factory=list)
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    files: int | None = None
    fs: str
    generation: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    not_kept: list[NotKept] = field(default_factory=list)
    old_removed: str | None = None
    origin: str
    overlay: bool
    owner: Owner | None = None
    passes: int | None = None
    pinned_until: datetime | None = None
    removed: list[str] = field(default_factory=list)
    replaced: str | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    source_kind: str | None = None
    state: str
    volume: str | None = None
    waited: bool
    warnings: list[str] = field(default_factory=list)
    etag: str = field(default="", compare=False)
    """For if_match of a later change."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Info of the API."""

    build_key: str | None = None
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    origin: str
    overlay: bool
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    state: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """Key of the API."""

    loaded: bool
    own: bool
    root: str


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Labels of the API."""

    labels: dict[str, str]
    ref: str


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of the API."""

    lower: str
    lower_bytes: int
    lower_id: str
    lower_removed: bool
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Lineage of the API."""

    items: list[LineageSum]


@dataclass(frozen=True, kw_only=True)
class LineageSum:
    """LineageSum of the API."""

    exclusive_bytes: int
    generation: int
    golden: str
    kind: str
    logical_bytes: int
    objects: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class ListedPoint:
    """ListedPoint of the API."""

    consistency: str | None = None
    content: str
    created_at: datetime
    keep: bool | None = None
    logical_bytes: int
    name: str
    origin: str | None = None
    size_bytes: int
    stored_bytes: int


@dataclass(frozen=True, kw_only=True)
class NotKept:
    """NotKept of the API."""

    count: int
    example: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Operation of the API."""

    by: str
    """Who began it."""
    error: Problem | None = None
    """Of one that failed or was canceled."""
    finished_at: datetime | None = None
    id: str
    progress: OperationProgress
    ref: str
    """What it works on; may be empty."""
    result: Any = None
    """Of one that is done: as the command prints it as JSON."""
    started_at: datetime
    state: str
    verb: str
    """As on the command line: push, gc."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class OperationList:
    """OperationList of the API."""

    items: list[Operation]


@dataclass(frozen=True, kw_only=True)
class OperationProgress:
    """OperationProgress of the API."""

    bytes: int
    files: int
    stage: str
    stalled: str | None = None
    """Why it makes no progress at the moment."""
    total_bytes: int
    total_files: int


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Owner of the API."""

    gid: int
    uid: int


@dataclass(frozen=True, kw_only=True)
class PoolInfo:
    """PoolInfo of the API."""

    backing: str
    backing_bytes: int
    clone_cost: str
    dir: str
    driver: str
    free_bytes: int
    generations: int
    goldens: int
    id: str
    logical_bytes: int
    measured_exact: bool
    min_free_percent: float
    mounted: int
    physical_bytes: int
    saved_ratio: float
    snapshots: int
    tied_bytes: int | None = None
    ties: int | None = None
    total_bytes: int
    trash_bytes: int
    trash_objects: int
    used_bytes: int
    volumes: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Remains of the API."""

    bytes: int
    destroyed_at: datetime | None = None
    kind: str
    ref: str
    why: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RemainsList:
    """RemainsList of the API."""

    items: list[Remains]


@dataclass(frozen=True, kw_only=True)
class RemoteInfo:
    """RemoteInfo of the API."""

    added_at: datetime
    name: str


@dataclass(frozen=True, kw_only=True)
class RemoteList:
    """RemoteList of the API."""

    items: list[RemoteInfo]


@dataclass(frozen=True, kw_only=True)
class RemoteVolume:
    """RemoteVolume of the API."""

    name: str
    newest_point: ListedPoint | None = None
    """Missing if it has no points."""
    points: int
    """How many snapshots or generations of it there are."""
    problem: str | None = None
    """Why the list of its points cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RemoteVolumes:
    """RemoteVolumes of the API."""

    items: list[RemoteVolume]


@dataclass(frozen=True, kw_only=True)
class RenamedObject:
    """RenamedObject of the API."""

    build_key: str | None = None
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    name_before: str
    origin: str
    overlay: bool
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    state: str
    warnings: list[str] = field(default_factory=list)
    etag: str = field(default="", compare=False)
    """For if_match of a later change."""


@dataclass(frozen=True, kw_only=True)
class ResizedVolume:
    """ResizedVolume of the API."""

    build_key: str | None = None
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    origin: str
    overlay: bool
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_before_bytes: int
    size_bytes: int
    state: str
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RewoundVolume:
    """RewoundVolume of the API."""

    before: str
    build_key: str | None = None
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    origin: str
    overlay: bool
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    state: str
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SnapshotGroup:
    """SnapshotGroup of the API."""

    frozen_seconds: float
    name: str
    snapshots: list[Info] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SnapshotList:
    """SnapshotList of the API."""

    items: list[Info]


@dataclass(frozen=True, kw_only=True)
class SpaceHistory:
    """SpaceHistory of the API."""

    items: list[SpacePoint]


@dataclass(frozen=True, kw_only=True)
class SpacePoint:
    """SpacePoint of the API."""

    time: datetime
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of the API."""

    all_rights: bool
    """The caller may do everything, as root may."""
    caller: str
    """Who sent this request."""
    driver: str
    pool: str
    """Directory of the pool."""
    pool_id: str
    running_operations: int
    started_at: datetime
    tasks: list[Task]
    """What the service does by itself."""
    version: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of the API."""

    every_seconds: float
    """0: when there is something to do."""
    failures: int
    """Runs that have failed in a row."""
    last_error: Problem | None = None
    """Of the last run, if it failed."""
    last_finished_at: datetime | None = None
    last_result: str
    """Of the last run that did not fail."""
    last_started_at: datetime | None = None
    name: str
    next_at: datetime | None = None
    """When it is due; null: unknown."""
    ref: str
    """What it works on; may be empty."""
    running: bool
    runs: int
    """That have ended since the service started."""
    verb: str
    """What it does: snapshot, push."""


@dataclass(frozen=True, kw_only=True)
class TaskList:
    """TaskList of the API."""

    items: list[Task]


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Volume of the API."""

    build_key: str | None = None
    consistency: str
    created_at: datetime
    driver: str
    ephemeral: bool
    exclusive_bytes: int
    expires_at: datetime | None = None
    extents: int
    fs: str
    generation: int
    golden: str
    id: str
    kind: str
    labels: dict[str, str]
    last_used_at: datetime
    logical_bytes: int
    measured_at: datetime | None = None
    mountpoint: str
    name: str
    origin: str
    overlay: bool
    owner: Owner | None = None
    pinned_until: datetime | None = None
    sandboxed: bool | None = None
    shared_bytes: int
    size_bytes: int
    state: str
    warnings: list[str] = field(default_factory=list)
    """Problems that did not prevent this."""
    etag: str = field(default="", compare=False)
    """For if_match of a later change."""


@dataclass(frozen=True, kw_only=True)
class VolumePage:
    """VolumePage of the API."""

    items: list[Info]
    next: str
    """Value of after for the next page; empty: this is the last one."""


@dataclass(frozen=True, kw_only=True)
class WebLogin:
    """WebLogin of the API."""

    expires_at: datetime
    url: str
    """Signs one browser in, once, with the rights of the caller."""
