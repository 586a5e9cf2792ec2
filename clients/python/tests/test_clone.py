"""Clones: a with statement, and what can go wrong in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from conftest import Service

import pando


def names() -> list[str]:
    return [v.name for v in pando.volumes()]


def test_with_statement(service: Service) -> None:
    with pando.clone("web") as v:
        subprocess.run(["sh", "-c", "cat index.html && echo own > new"], cwd=v.path, check=True)
        assert (v.path / "new").read_text() == "own\n"
        assert os.path.ismount(v.path)
        assert os.listdir(v)  # a volume is a path
        assert v.name.startswith("web-")
        assert v.info.golden == "web"
        assert isinstance(v.info.created_at, datetime)
        assert abs(datetime.now(timezone.utc) - v.info.created_at) < timedelta(minutes=1)
        assert service.command("ls", "-q").split() == [v.name]
    assert not os.path.exists(v.path)
    assert names() == []


def test_options(client: pando.Client, tmp_path: Path) -> None:
    owner = pando.models.Owner(uid=1000, gid=1000)
    where = tmp_path / "here"
    with client.clone(
        "web@1", "job", ttl=timedelta(hours=1), labels={"team": "search"}, mount_dir=where, owner=owner, freeze="never"
    ) as v:
        assert v.name == "job"
        assert v.path == where
        assert v.labels == {"team": "search"}
        assert v.info.owner == owner
        assert v.info.expires_at
        assert timedelta(minutes=59) < v.info.expires_at - datetime.now(timezone.utc) <= timedelta(hours=1)
        assert [x.name for x in client.volumes(labels=["team=search"])] == ["job"]
    with client.clone("web", mount=False, ttl=0.5) as v, pytest.raises(pando.Conflict, match="not mounted"):
        v.path  # noqa: B018


def test_exception_in_statement(client: pando.Client) -> None:
    with pytest.raises(ZeroDivisionError), client.clone("web"):
        1 / 0  # noqa: B018
    assert names() == []


def test_volume_in_use(client: pando.Client) -> None:
    with pytest.raises(pando.InUse) as caught, client.clone("web", "busy") as v:
        user = subprocess.Popen(["sleep", "60"], cwd=v.path)
    assert caught.value.kind == "in_use"
    assert caught.value.ref == "busy"
    assert caught.value.hint
    assert caught.value.status == 409
    assert names() == ["busy"]

    # What happened in the statement matters more.
    with pytest.raises(ZeroDivisionError) as other, client.clone("web", "busy2") as v2:  # noqa: PT012
        user2 = subprocess.Popen(["sleep", "60"], cwd=v2.path)
        1 / 0  # noqa: B018
    if sys.version_info >= (3, 11):
        assert "busy2 was not destroyed" in other.value.__notes__[0]

    for process in (user, user2):
        process.kill()
        process.wait()
    assert {d.ref for d in client.destroy("busy*").destroyed} == {"busy", "busy2"}


def test_gone_before_end(client: pando.Client) -> None:
    with client.clone("web") as v:
        v.destroy()
    with client.clone("web") as v:
        v.rename("other-name")
        assert v.name == "other-name"
    assert names() == []
    with pytest.raises(pando.NotFound):
        v.destroy()


def test_keep(client: pando.Client) -> None:
    with client.clone("web", "stays") as v:
        v.keep()
    assert names() == ["stays"]
    v.destroy()

    v = client.clone("web", "stays-too").create()
    assert names() == ["stays-too"]
    v.destroy()


def test_names(client: pando.Client) -> None:
    with client.clone("web") as a, client.clone("web@1") as b, a.fork() as c, client.clone(a.snapshot("s").name) as d:
        assert len({a.name, b.name, c.name, d.name}) == 4
        with pytest.raises(pando.Exists) as caught, client.clone("web", a.name):
            pytest.fail("there must not be two")
        assert caught.value.kind == "exists"
        assert names() == sorted([a.name, b.name, c.name, d.name])


INTERRUPTED = """
    import os, signal, sys, threading, time
    import pando
    {setup}
    try:
        with pando.clone("web", "interrupted") as v:
            {body}
            time.sleep(30)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(7)
"""


@pytest.mark.parametrize(
    ("setup", "body"),
    [
        # In the statement.
        ("", "os.kill(os.getpid(), signal.SIGINT)"),
        # Before the response to the clone is read.
        (
            "import pando._transport as t\n"
            "    read = t.http.client.HTTPResponse.begin\n"
            "    def begin(self):\n"
            "        t.http.client.HTTPResponse.begin = read\n"
            "        time.sleep(0.5); os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
            "    t.http.client.HTTPResponse.begin = begin",
            "pass",
        ),
        # Between the response and the statement.
        (
            "enter = pando.Clone.__enter__\n"
            "    def entered(self):\n"
            "        enter(self); os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
            "    pando.Clone.__enter__ = entered",
            "pass",
        ),
        # While it is destroyed.
        (
            "destroy = pando.Volume.destroy\n"
            "    def destroyed(self):\n"
            "        pando.Volume.destroy = destroy\n"
            "        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
            "    pando.Volume.destroy = destroyed",
            "raise KeyboardInterrupt",
        ),
    ],
    ids=["in-statement", "before-response", "after-response", "while-destroying"],
)
def test_interrupts(service: Service, setup: str, body: str) -> None:
    program = textwrap.dedent(INTERRUPTED.format(setup=setup, body=body))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "interrupted\n"), done.stderr
    service.wait_for("interrupted", there=False)
    verbs = [e.verb for e in pando.connect().history("interrupted")]
    assert "clone" in verbs, "it was never made: the interrupt came too early to show anything"


def test_fork_of_the_process(client: pando.Client) -> None:
    with client.clone("web", "parent") as v:
        child = os.fork()
        if child == 0:  # sys.exit runs what atexit has, in the child
            code = "0"
            try:
                code = str(int([x.name for x in client.volumes()] != ["parent"]))
            finally:
                os.execv(sys.executable, [sys.executable, "-c", f"raise SystemExit({code})"])
        assert os.waitpid(child, 0)[1] == 0
        assert names() == ["parent"]
        assert v.refresh().name == "parent"


def test_exit_in_forked_child(service: Service) -> None:
    program = """
        import os, sys
        import pando
        with pando.clone("web", "shared") as v:
            child = os.fork()
            if child == 0:
                from pando.volume import _destroy_open
                _destroy_open()
                os._exit(0)
            os.waitpid(child, 0)
            assert [x.name for x in pando.volumes()] == ["shared"]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
    service.wait_for("shared", there=False)


@pytest.mark.usefixtures("service")
def test_killed_program_leaves_ttl() -> None:
    program = "import os, signal, pando\nwith pando.clone('web', 'killed', ttl=1): os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert names() == ["killed"]
    info = pando.volume("killed").info
    assert info.expires_at
    assert info.expires_at - info.created_at <= timedelta(seconds=2)
    pando.volume("killed").destroy()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda c: c.clone("nix").create(), pando.NotFound),
        (lambda c: c.clone("web", "a/b").create(), pando.Invalid),
        (lambda c: c.clone("web", ttl=-1).create(), pando.Invalid),
        (lambda c: c.volume("nix"), pando.NotFound),
        (lambda c: c.golden("nix"), pando.NotFound),
        (lambda c: c.operation("nix"), pando.NotFound),
        (lambda c: c.import_golden("web", b"x"), pando.Exists),
        (lambda c: c.import_golden("new", b"no archive"), pando.Invalid),
        (lambda c: c.api.set_golden("web", keep=2, if_match='"0"'), pando.Changed),
        (lambda c: next(c.events(after="nix")), pando.Invalid),
        (lambda c: c.push("nix", "web"), pando.NotFound),
    ],
)
def test_errors(client: pando.Client, call: Callable[[pando.Client], object], kind: type[pando.PandoError]) -> None:
    with pytest.raises(kind) as caught:
        call(client)
    e = caught.value
    assert e.kind == kind.kind
    assert 400 <= e.status < 500
    assert e.detail in str(e)
    assert e.op or e.hint
    assert names() == []


def test_fields_of_errors(client: pando.Client) -> None:
    with pytest.raises(pando.Invalid) as caught:
        client.clone("web", ttl=-1).create()
    assert caught.value.errors[0].location == "body.ttl_seconds"
    with pytest.raises(pando.NotFound) as missing:
        client.clone("wbe").create()
    assert (missing.value.op, missing.value.ref) == ("clone", "wbe")
    assert "GET /v1/volumes" in missing.value.hint
