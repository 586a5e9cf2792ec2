"""Reaching the service: sockets, TLS, lost connections and restarts."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Service

import pando


class Faulty:
    """A unix socket in front of the service that loses responses: the service carries out the request."""

    def __init__(self, service: Service, path: Path) -> None:
        self.target, self.path = service.socket, path
        self.lose: list[bytes] = []
        """Starts of requests whose next response is lost."""
        self.cut = -1
        """Length of the next response, if it is not negative."""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX) as far:
            far.connect(str(self.target))
            while request := near.recv(1 << 16):
                time.sleep(0.01)
                near.setblocking(False)
                try:
                    request += near.recv(1 << 16)  # headers and body come in two parts
                except BlockingIOError:
                    pass
                finally:
                    near.setblocking(True)
                far.sendall(request)
                response = far.recv(1 << 20)
                for start in self.lose:
                    if request.startswith(start):
                        self.lose.remove(start)
                        return
                if self.cut >= 0:
                    near.sendall(response[: self.cut])
                    self.cut = -1
                    return
                near.sendall(response)

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def faulty(service: Service, tmp_path: Path) -> Iterator[Faulty]:
    f = Faulty(service, tmp_path / "faulty.sock")
    yield f
    f.close()


def test_lost_responses_make_one_volume(service: Service, faulty: Faulty) -> None:
    with pando.connect(faulty.path) as c:
        faulty.lose = [b"POST /v1/volumes ", b"POST /v1/volumes "]
        with c.clone("web", "lost") as v:
            assert faulty.lose == []
            assert (v.path / "index.html").exists()
            assert service.command("ls", "-q").split() == ["lost"]

            faulty.lose = [b"POST /v1/volumes/lost/snapshots", b"GET /v1/volumes/lost/snapshots"]
            v.snapshot("s")
            assert [s.short_name for s in v.snapshots()] == ["s"]
            faulty.lose = [b"DELETE /v1/volumes/lost "]
        assert faulty.lose == []
        assert service.command("ls", "-q") == ""
        assert [e.verb for e in c.history("lost")].count("clone") == 1


def test_a_lost_destroy_spares_the_next_volume(service: Service, faulty: Faulty) -> None:
    with pando.connect(faulty.path) as c:
        v = c.clone("web", "reused").create()
        send = c.api.destroy_volume

        def replaced(volume: str, *, id: str | None = None, if_match: str | None = None) -> None:
            if id is not None:
                service.command("clone", "web", volume, "-q")  # by somebody else, while nobody answers
            send(volume, id=id, if_match=if_match)

        c.api.destroy_volume = replaced  # type: ignore[method-assign]
        faulty.lose = [b"DELETE "]
        v.destroy()
        assert service.command("ls", "-q").split() == ["reused"]

        first = c.clone("web", "several").create()
        faulty.lose = [b"POST /v1/destroy ", b"POST /v1/destroy "]
        c.destroy("sever*")
        assert faulty.lose == []
        assert first.name not in service.command("ls", "-q").split()
    service.command("destroy", "reused")


def test_what_is_not_repeated(service: Service, faulty: Faulty) -> None:
    with pando.connect(faulty.path) as c, c.clone("web", "once") as v:
        faulty.lose = [b"PATCH /v1/labels/once"]
        with pytest.raises(pando.Unreachable, match="connection was lost") as caught:
            v.set_labels({"a": "b"})
        assert caught.value.sent
        assert isinstance(caught.value, ConnectionError)
        assert c.volume("once").labels == {"a": "b"}
    assert service.command("ls", "-q") == ""


@pytest.mark.parametrize("cut", [0, 10, 200, 400])
def test_cut_responses(service: Service, faulty: Faulty, cut: int) -> None:
    with pando.connect(faulty.path) as c:
        expected = pando.connect(service.socket).golden("web")
        faulty.cut = cut
        assert c.golden("web").id == expected.id
        assert faulty.cut == -1


def test_cut_export(faulty: Faulty) -> None:
    with pando.connect(faulty.path) as c, c.clone("web", mount=False) as v:
        faulty.cut = 2000
        with v.export() as stream, pytest.raises(pando.Unreachable):
            stream.read()


def test_patience_ends(service: Service, faulty: Faulty) -> None:
    with pando.connect(faulty.path, patience=0.3) as c:
        faulty.lose = [b"GET "] * 100
        with pytest.raises(pando.Unreachable):
            c.pool()
    assert service.command("ls", "-q") == ""


def test_no_service(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(pando.Unreachable) as caught:
        pando.connect(tmp_path / "nix").service()
    assert time.monotonic() - begin < 5, "a service that was never there is not waited for"
    assert not caught.value.sent
    assert str(tmp_path / "nix") in str(caught.value)
    assert "pando serve" in caught.value.hint
    assert caught.value.kind == "unreachable"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_restarts(service: Service, client: pando.Client, how: signal.Signals) -> None:
    with client.clone("web", "survivor") as v:
        stopped = threading.Event()

        def restart() -> None:
            service.stop(how)
            stopped.set()
            time.sleep(0.3)
            service.start()

        thread = threading.Thread(target=restart)
        thread.start()
        assert stopped.wait(30)
        with client.clone("web") as other:
            assert {x.name for x in client.volumes()} == {"survivor", other.name}
        thread.join(30)
        assert (v.path / "index.html").exists()
    assert service.command("ls", "-q") == ""


def test_destroy_waits_for_a_restart(service: Service, client: pando.Client) -> None:
    with client.clone("web"):
        service.stop()
        threading.Timer(0.3, service.start).start()
    assert service.command("ls", "-q") == ""


def test_threads(client: pando.Client) -> None:
    def job(n: int) -> str:
        with client.clone("web") as v:
            (v.path / "n").write_text(str(n))
            assert (v.path / "n").read_text() == str(n)
            return v.name

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        made = list(pool.map(job, range(60)))
    assert len(set(made)) == 60
    assert list(client.volumes()) == []


def test_connections_are_reused(client: pando.Client) -> None:
    client.pool()
    before = count_sockets()
    for _ in range(50):
        client.pool()
        with pytest.raises(pando.NotFound):
            client.volume("nix")
    assert count_sockets() == before


def count_sockets() -> int:
    links = [f"/proc/self/fd/{f}" for f in os.listdir("/proc/self/fd")]
    return sum(os.readlink(f).startswith("socket:") for f in links if os.path.lexists(f))


def test_timeout(service: Service, tmp_path: Path) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent"))
    silent.listen()
    with pytest.raises(pando.Unreachable, match="timed out"):
        pando.connect(tmp_path / "silent", timeout=0.1, patience=0.3).pool()
    silent.close()
    assert service.command("ls", "-q") == ""


def test_token(service: Service) -> None:
    url = f"http://{service.address}"
    with pando.connect(url=url, token=service.token) as c, c.clone("web") as v:
        assert c.service().caller == "token tests"
        assert v.path.exists()
    for token in (None, "pando_wrong"):
        with pytest.raises(pando.Permission) as caught:
            pando.connect(url=url, token=token).pool()
        assert caught.value.status == 401
    assert service.token not in repr(vars(caught.value))


@pytest.mark.parametrize(
    "url", ["http://example.com:80", "ftp://localhost", "localhost:80", "https://h/path", "/socket"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(pando.Invalid):
        pando.connect(url=url, token="secret")


def test_tls(service: Service, tmp_path: Path) -> None:
    key, cert = tmp_path / "key", tmp_path / "cert"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    make += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(make, check=True, capture_output=True)
    other = Service(tmp_path)
    other.pool, other.tokens = service.pool, service.tokens
    other.options = ["--tls-cert", str(cert), "--tls-key", str(key)]
    other.start()
    url = f"https://localhost:{other.address.rpartition(':')[2]}"
    with pytest.raises(pando.Unreachable, match=r"certificate|CERTIFICATE"):
        pando.connect(url=url, token=service.token).pool()
    trusted = ssl.create_default_context(cafile=str(cert))
    with pando.connect(url=url, token=service.token, ssl_context=trusted) as c, c.clone("web") as v:
        assert v.path.exists()
    other.stop()
