"""A running service for the tests: a real `pando serve` on a pool of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pando

PROGRAM = os.environ.get("PANDO_TEST_BINARY") or shutil.which("pando")


class Service:
    """A service on a pool of its own, which tests may stop, kill and start again."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.pool, self.socket, self.tokens = top / "pool", top / "pando.sock", top / "tokens"
        self.address = self.token = ""
        self.options: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def command(self, *args: str) -> str:
        """Runs a command of the pool, and returns what it prints."""
        assert PROGRAM
        run = [PROGRAM, "--pool", str(self.pool), *args]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Starts the service, and waits until it listens."""
        assert PROGRAM
        run = [PROGRAM, "--pool", str(self.pool), "serve", "--socket", str(self.socket)]
        run += ["--listen", self.address or "127.0.0.1:0", "--token-file", str(self.tokens)]
        run += self.options
        self.process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if "listening on 127.0.0.1:" in line:
                self.address = line.split()[-1]
                return
        pytest.fail(f"the service ended: {''.join(seen)}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the service, and waits until it has ended."""
        assert self.process
        assert self.process.stderr
        self.process.send_signal(how)
        self.process.wait(30)
        self.process.stderr.close()

    def wait_for(self, what: str, there: bool = True) -> None:
        """Waits until the pool has a volume, or has it no longer."""
        end = time.monotonic() + 20
        while (what in self.command("ls", "-q").split()) != there:
            assert time.monotonic() < end, f"{what} is {'not ' if there else ''}there"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service that all tests share."""
    assert os.geteuid() == 0, "mounting needs root: run the tests as root"
    assert PROGRAM, "PANDO_TEST_BINARY does not name the pando program"
    s = Service(tmp_path_factory.mktemp("pando"))
    s.command("init", "-q", "--size", "1G")
    s.token = s.command("serve", "token", "tests", "--token-file", str(s.tokens)).strip()
    s.start()
    os.environ["PANDO_SOCKET"] = str(s.socket)

    site = s.top / "site"
    site.mkdir()
    (site / "index.html").write_text("v1\n")
    with pando.connect(s.socket) as c:
        c.import_golden("web", site)
    yield s
    s.stop()
    assert s.process
    assert s.process.returncode == 0
    assert s.command("ls", "-q") == "", "tests left volumes behind"
    s.command("deinit", "--force")  # it has the keys of a remote


@pytest.fixture
def client(service: Service) -> Iterator[pando.Client]:
    """A client of the service."""
    with pando.connect(service.socket) as c:
        yield c
