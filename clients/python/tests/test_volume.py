"""Volumes, goldens, operations and events."""

from __future__ import annotations

import io
import subprocess
import tarfile
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from conftest import Service

import pando


def test_snapshots(client: pando.Client) -> None:
    with client.clone("web") as v:
        file = v.path / "index.html"
        s = v.snapshot("before", labels={"a": "b"})
        assert s.name == f"{v.name}@before"
        assert s.short_name == "before"
        assert s.info.labels == {"a": "b"}
        file.write_text("changed\n")

        changes = v.diff(s).changes
        assert [c.path for c in changes] == ["index.html"]
        assert [c.path for c in v.diff().changes] == ["index.html"]

        v.rewind(s, detach=True)
        assert file.read_text() == "v1\n"
        assert v.diff().changes == []
        assert "before" in [x.short_name for x in v.snapshots()]  # and what was there before the rewind
        for snapshot in v.snapshots():
            snapshot.destroy()
        assert v.snapshots() == []
        assert v.snapshot().short_name.startswith("20")


def test_fork_sees_what_is_written(client: pando.Client) -> None:
    with client.clone("web") as v:
        (v.path / "own").write_text("x")
        with v.fork() as f, v.fork("named", mount=False, ttl=60, labels={"k": "v"}) as g:
            assert (f.path / "own").read_text() == "x"
            assert f.info.origin == v.name or f.info.golden == "web"
            assert g.labels == {"k": "v"}
            assert g.mount() == g.path
            g.unmount()
            assert g.info.mountpoint == ""


def test_changes_of_a_volume(client: pando.Client, tmp_path: Path) -> None:
    with client.clone("web", "job", mount=False) as v:
        assert v.set_labels({"a": "1", "b": "2"}) == {"a": "1", "b": "2"}
        assert v.set_labels({"c": "3"}, remove=["a"]) == {"b": "2", "c": "3"}
        v.pin(timedelta(hours=1))
        assert v.info.pinned_until
        with pytest.raises(pando.PandoError, match="pinned"):
            v.destroy()
        v.unpin()
        assert v.info.pinned_until is None
        larger = v.info.size_bytes + (64 << 20)
        v.resize(larger)
        assert v.info.size_bytes == larger
        assert v.mount(tmp_path / "there") == tmp_path / "there"
        assert (v.path / "index.html").read_text() == "v1\n"


def test_publish_rebase_flatten(client: pando.Client) -> None:
    client.import_golden("app", tar({"f": "1"}))
    with client.clone("app") as v, client.clone("app") as old:
        (v.path / "f").write_text("2")
        assert v.publish().wait()["generation"] == 2
        assert v.publish("other", labels={"x": "y"}).wait()["golden"] == "other"

        (old.path / "own").write_text("o")
        old.unmount()
        old.rebase("app@2").wait()
        old.mount()
        assert (old.path / "f").read_text() == "2"
        assert (old.path / "own").read_text() == "o"

    assert [g.generation for g in client.golden("app").generations] == [1, 2]
    assert {"web", "app", "other"} <= {g.golden for g in client.goldens() if g.volumes == 0}
    client.remove_golden("app")
    client.remove_golden("other")
    with client.clone("web", overlay=True) as o:
        o.unmount()
        o.flatten().wait()
        assert not o.refresh().overlay


def tar(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def test_imports_and_exports(client: pando.Client, tmp_path: Path) -> None:
    path = tmp_path / "f.tar.gz"
    path.write_bytes(tar({"f": "from a file"}))
    assert client.import_golden("a", path, keep=3, labels={"k": "v"}).labels == {"k": "v"}
    with path.open("rb") as f:
        assert client.import_golden("a", f, update=True).generation == 2
    assert client.import_golden("a", str(path.parent), update=True).generation == 3

    with client.clone("a@2", mount=False) as v, v.export() as stream:
        with tarfile.open(fileobj=io.BytesIO(stream.read())) as archive:
            member = archive.extractfile("f")
            assert member
            assert member.read() == b"from a file"
        with v.export("raw") as image:
            assert sum(len(block) for block in image) == v.refresh().size_bytes
    client.remove_golden("a")


def test_lists(client: pando.Client) -> None:
    made = [client.clone("web", f"v{i:02}", mount=False, labels={"n": str(i % 2)}).create() for i in range(7)]
    assert [v.name for v in client.volumes(page=3)] == [v.name for v in made]
    assert [v.name for v in client.volumes(labels=["n=1"], page=1)] == ["v01", "v03", "v05"]
    assert list(client.volumes(golden="nix")) == []
    group = client.snapshot_group(["v00", "v01"], "g")
    assert group.name == "g"
    assert [s.name for s in group.snapshots] == ["v00@g", "v01@g"]
    assert client.diff("v00", "v01").changes == []
    assert {d.ref for d in client.destroy(labels=["n"]).destroyed} == {v.name for v in made} | {"v00@g", "v01@g"}


def test_service_and_pool(client: pando.Client, service: Service) -> None:
    status = client.service()
    assert status.pool == str(service.pool)
    assert status.caller == "root"
    assert client.pool().goldens >= 1
    assert client.pool().free_bytes > 0


def test_operations(client: pando.Client) -> None:
    seen: list[pando.models.Operation] = []
    op = client.gc()
    result = op.wait(progress=seen.append)
    assert isinstance(result, dict)
    assert op.state == "done"
    assert seen[-1].state == "done"
    assert seen[-1].progress.total_bytes >= 0
    assert op.id in [o.id for o in client.operations()]
    assert client.operation(op.id).wait() == result
    assert client.fsck().wait()["ok"] is True
    assert client.prune(dry_run=True, older_than_seconds=3600.0).wait() is not None
    op.cancel()  # one that has ended stays as it is
    assert op.refresh().state == "done"


def test_operation_that_fails(client: pando.Client) -> None:
    op = client.api.publish_golden("web", volume="nix")
    with pytest.raises(pando.NotFound) as caught:
        pando.Operation(client.api, op).wait()
    assert caught.value.ref == "nix"
    failed = client.operation(op.id)
    assert failed.state == "failed"
    assert isinstance(failed.error, pando.NotFound)


def test_cancel(client: pando.Client) -> None:
    # An import that is under way is an operation, too.
    begun, go_on = threading.Event(), threading.Event()

    def body() -> object:
        yield tar({"f": "x"})[:20]
        begun.set()
        go_on.wait(30)

    failed: list[BaseException] = []

    def load() -> None:
        try:
            client.api.import_golden("slow", body())  # type: ignore[arg-type]
        except pando.PandoError as e:
            failed.append(e)

    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(30)
    op = next(o for o in client.operations() if o.info.verb == "import" and o.state == "running")
    with pytest.raises(TimeoutError, match="still runs"):
        op.wait(timeout=0.2)
    op.cancel()
    with pytest.raises(pando.Canceled):
        op.wait(timeout=30)
    go_on.set()
    thread.join(30)
    assert len(failed) == 1
    assert "slow" not in [g.golden for g in client.goldens()]


def test_events(client: pando.Client, service: Service) -> None:
    events = client.events(after="0")
    first = next(e for e in events if not e.gap)
    assert first.info
    assert first.verb
    assert first.id

    # What another process does, and after a restart from where it was.
    service.command("clone", "web", "by-cli", "-q")
    seen = next(e for e in events if e.name == "by-cli")
    assert seen.verb == "clone"
    service.stop()
    service.command("destroy", "by-cli", "-q")
    service.start()
    after = next(events)
    assert (after.verb, after.name) == ("destroy", "by-cli")

    # A new stream continues where the old one was.
    again = next(client.events(after=seen.id))
    assert (again.verb, again.name) == ("destroy", "by-cli")
    since = datetime.now(timezone.utc) - timedelta(minutes=5)
    assert [e.verb for e in client.history("by-cli", since=since, limit=10)] == ["clone", "destroy"]


def test_gap(client: pando.Client) -> None:
    first = next(client.events(after="0"))
    other = first.id.replace(first.id[0], "0" if first.id[0] != "0" else "1", 1)
    for event in client.events(after=other):
        assert event.gap
        assert event.verb == "gap"
        assert event.info is None
        break


def test_remotes(client: pando.Client, service: Service, tmp_path: Path) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    secret.chmod(0o600)
    service.command("remote", "add", "store", f"file:{tmp_path}/store", "--passphrase-file", str(secret))
    with client.clone("web", "pushed", mount=False):
        assert client.push("store", "pushed").wait() is not None
        assert client.verify("store", read_percent=100.0).wait()["total_problems"] == 0
    pulled = client.pull("store", "pushed", as_="pulled").wait()
    assert pulled is not None
    v = client.volume("pulled")
    v.mount()
    assert subprocess.run(["cat", v.path / "index.html"], capture_output=True, check=True).stdout == b"v1\n"
    v.destroy()
