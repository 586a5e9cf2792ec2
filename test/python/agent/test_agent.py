"""An agent with nothing but the tools of `pando mcp`, driven by the client library of the Model Context Protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client

PROGRAM = os.environ["PANDO_TEST_BINARY"]


class Pool:
    """A pool with the golden web, which other users cannot read."""

    def __init__(self, top: Path) -> None:
        self.top, self.dir, self.log = top, top / "pool", top / "log"
        source = top / "source"
        source.mkdir()
        (source / "answer.py").write_text("print(6 * 7)\n")
        self.command("init", "-q", "--size", "1G")
        self.command("golden", "import", "web", str(source))

    def command(self, *args: str) -> str:
        """Runs a command of the pool, and returns what it prints."""
        done = subprocess.run([PROGRAM, "--pool", str(self.dir), *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    def volumes(self) -> list[dict[str, Any]]:
        """Lists the volumes."""
        volumes: list[dict[str, Any]] = json.loads(self.command("ls", "--json"))
        return volumes

    @asynccontextmanager
    async def agent(self, *args: str, run: tuple[str, ...] = ()) -> AsyncIterator[Client]:
        """An agent with a server of its own, which writes its log to self.log."""
        words = [*(run or (PROGRAM, "--pool", str(self.dir), "mcp")), *args]
        with self.log.open("w") as log:
            parameters = StdioServerParameters(command=words[0], args=words[1:])
            async with Client(stdio_client(parameters, errlog=log)) as client:
                yield client


@pytest.fixture(name="pool")
def _pool() -> Iterator[Pool]:
    assert os.geteuid() == 0, "mounting needs root: run the tests as root"
    top = Path(tempfile.mkdtemp(prefix="pando-mcp-"))
    top.chmod(0o755)
    pool = Pool(top)
    yield pool
    pool.command("deinit", "--force")
    shutil.rmtree(top)


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Calls a tool that must succeed, and returns its structured result, which the client checks against the schema."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    content: dict[str, Any] = result.structured_content
    return content


async def fails(client: Client, tool: str, **arguments: Any) -> dict[str, str]:
    """Calls a tool that must fail, and returns its error."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    error: dict[str, str] = json.loads(result.content[0].text)["error"]  # type: ignore[union-attr]
    return error


async def task(client: Client) -> None:
    """A real task: fix a program in a clone, test it, look at the change, publish it, and clean up."""
    limits = (await call(client, "list"))["limits"]
    volume = (await call(client, "clone", **{"from": "web", "name": limits["prefix"] + "fix"}))["volume"]["name"]
    text = await call(client, "read_file", volume=volume, path="answer.py")
    assert "untrusted" in text["notice"]
    await call(client, "snapshot", volume=volume, name="before")
    changed = text["content"].replace("6 * 7", "6 * 9")
    await call(client, "write_file", volume=volume, path="answer.py", content=changed)
    ran = await call(client, "run", volume=volume, command=["python3", "answer.py"])
    assert (ran["exit"], ran["stdout"], ran["stderr"]) == (0, "54\n", "")
    diff = await call(client, "diff", volume=volume)
    assert [(c["op"], c["path"]) for c in diff["changes"]] == [("modified", "answer.py")]
    published = await call(client, "publish", volume=volume, golden="agent-web")
    assert published["ref"] == "agent-web@1"
    await call(client, "rewind", volume=volume, snapshot="before")
    ran = await call(client, "run", volume=volume, command=["python3", "answer.py"])
    assert ran["stdout"] == "42\n"
    await call(client, "clone", **{"from": "agent-web"})
    await call(client, "destroy", ref=volume)


def test_task(pool: Pool) -> None:
    """Everything that the agent has made is gone at the end, or named."""

    async def session() -> None:
        async with pool.agent("--golden", "web", "--publish", "agent-*") as client:
            await task(client)
            (left,) = pool.volumes()
            assert (await fails(client, "destroy", ref="other"))["kind"] == "permission"

        assert pool.volumes() == []
        log = pool.log.read_text()
        assert f"destroyed {left['name']}\n" in log
        assert "published agent-web@1\n" in log

    anyio.run(session)


def user_of(pool: Pool) -> tuple[str, ...]:
    """The words that run a server as another user."""
    program = pool.top / "pando"
    shutil.copy(PROGRAM, program)
    ids = ("--reuid", "2001", "--regid", "2001", "--clear-groups")
    return ("setpriv", *ids, str(program), "--socket", str(pool.top / "socket"), "mcp")


@pytest.fixture(name="service")
def _service(pool: Pool) -> Iterator[Pool]:
    (pool.top / "mounts").mkdir()
    policy = pool.top / "policy.toml"
    policy.write_text(
        '[[rule]]\nusers = ["2001"]\ngoldens = ["web"]\npublish = ["agent-*"]\nmax_volumes = 3\n'
        f'mounts = ["{pool.top}/mounts/{{uid}}"]\n'
    )
    (pool.top / "mounts" / "2001").mkdir()
    os.chown(pool.top / "mounts" / "2001", 2001, 2001)
    socket = pool.top / "socket"
    words = [PROGRAM, "--pool", str(pool.dir), "serve", "--socket", str(socket), "--policy", str(policy)]
    with (pool.top / "service.log").open("w") as log, subprocess.Popen(words, stderr=log) as process:
        wait_for(socket.exists)
        socket.chmod(0o666)
        yield pool
        process.terminate()


def wait_for(what: Callable[[], bool]) -> None:
    """Waits for a condition."""
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def test_task_of_user(service: Pool) -> None:
    """A user without root does the same through the service, with the rights that the policy gives."""

    async def session() -> None:
        words = ("--golden", "*", "--publish", "*", "--max-volumes", "9")
        async with service.agent(*words, run=user_of(service)) as client:
            await task(client)
            (left,) = service.volumes()
            assert left["owner"]["uid"] == 2001
            script = ["sh", "-c", "id -u; ls /root /srv; touch new"]
            ran = await call(client, "run", volume=left["name"], command=script)
            assert ran["stdout"] == "2001\n"
            for _ in range(2):
                await call(client, "clone", **{"from": "web"})
            assert (await fails(client, "clone", **{"from": "web"}))["kind"] == "no_space"
        assert service.volumes() == []

    anyio.run(session)


def test_ends(pool: Pool) -> None:
    """SIGTERM while a command runs destroys what was made; after SIGKILL, it expires, and can be found by its label."""

    async def session() -> None:
        async with pool.agent("--golden", "web", "--prefix", "term") as client:
            volume = (await call(client, "clone", **{"from": "web"}))["volume"]["name"]
            async with anyio.create_task_group() as group:
                script = ["sh", "-c", "touch started; sleep 1000"]
                group.start_soon(ended, client, volume, script)
                (mounted,) = pool.volumes()
                started = Path(mounted["mountpoint"]) / "started"
                await anyio.to_thread.run_sync(wait_for, started.exists)
                os.kill(server("term"), signal.SIGTERM)
        assert pool.volumes() == []
        assert f"destroyed {volume}" in pool.log.read_text()

        async with pool.agent("--golden", "web", "--prefix", "kill") as client:
            volume = (await call(client, "clone", **{"from": "web"}))["volume"]["name"]
            os.kill(server("kill"), signal.SIGKILL)
        (left,) = json.loads(pool.command("ls", "--json", "--filter", "label=pando/mcp"))
        assert left["name"] == volume
        expires = left["expires_at"]
        assert expires is not None
        assert expires < time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 601))
        pool.command("destroy", volume)

    anyio.run(session)


def test_client_is_killed(pool: Pool) -> None:
    """A server whose client is gone, so that it can write neither results nor its log, destroys what was made."""
    words = [PROGRAM, "--pool", str(pool.dir), "mcp", "--golden", "web"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        send(process.stdin, id=1, method="initialize", params=info)
        process.stdout.readline()
        send(process.stdin, method="notifications/initialized")
        arguments: dict[str, Any] = {"from": "web", "name": "mcp-v"}
        send(process.stdin, id=2, method="tools/call", params={"name": "clone", "arguments": arguments})
        assert b'"isError"' not in process.stdout.readline()
        assert [v["name"] for v in pool.volumes()] == ["mcp-v"]

        # The result arrives after the client is gone, and before the server notices.
        arguments = {"volume": "mcp-v", "command": ["sleep", "0.1"]}
        send(process.stdin, id=3, method="tools/call", params={"name": "run", "arguments": arguments})
        process.stdout.close()
        process.stderr.close()
        time.sleep(1)
        process.stdin.close()
        process.wait(30)
    assert pool.volumes() == []


def send(pipe: IO[bytes], **message: Any) -> None:
    """Sends a message of JSON-RPC."""
    pipe.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    pipe.flush()


async def ended(client: Client, volume: str, script: list[str]) -> None:
    """Runs a command whose server ends."""
    with suppress(Exception):  # the connection is closed, or the call canceled
        await client.call_tool("run", {"volume": volume, "command": script})


def server(prefix: str) -> int:
    """The process of the server with a prefix."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"mcp" in words and prefix.encode() in words:
                return int(entry.name)
    raise AssertionError(f"no server has the prefix {prefix}")
