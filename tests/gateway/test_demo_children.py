import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.demo_children import ChildDied, Children

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def alive(pid: int) -> bool:
    """Running, and not merely waiting to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(200):
        if true():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("did not become true within 10 s")


async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        with pytest.raises(ChildDied, match="envoy could not be started: /nonexistent/envoy: No such file"):
            await children.start("envoy", ["/nonexistent/envoy"])


async def test_a_death_names_the_child_its_exit_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(7)"
    async with Children(tmp_path) as children:
        await children.start("steady", SLEEP)
        await children.start("engine-3", [sys.executable, "-c", code])
        with pytest.raises(ChildDied) as died:
            await asyncio.wait_for(children.first_death(), 20)
    message = str(died.value)
    assert message.startswith("engine-3 exited with 7; the end of ")
    assert {line.strip() for line in message.splitlines()[1:]} == {"one", "two"}


async def test_a_killed_child_is_reported_with_the_signal(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("gateway", SLEEP)
        child.process.send_signal(signal.SIGKILL)
        with pytest.raises(ChildDied, match="gateway was killed by SIGKILL"):
            await asyncio.wait_for(children.first_death(), 20)


async def test_leaving_stops_every_child_also_one_that_ignores_sigterm(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    async with Children(tmp_path) as children:
        pids = [
            (await children.start("polite", SLEEP)).process.pid,
            (await children.start("stubborn", [sys.executable, "-c", stubborn])).process.pid,
        ]
        await eventually(lambda: "up" in (tmp_path / "stubborn.log").read_text())
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


async def test_grandchildren_end_with_their_group(tmp_path: Path) -> None:
    code = f"""
import subprocess
p = subprocess.Popen({SLEEP!r}, stdout=subprocess.DEVNULL)
print(p.pid, flush=True)
p.wait()
"""
    async with Children(tmp_path) as children:
        await children.start("parent", [sys.executable, "-c", code])
        await eventually(lambda: (tmp_path / "parent.log").read_text().endswith("\n"))
        grandchild = int((tmp_path / "parent.log").read_text())
        assert alive(grandchild)
    await eventually(lambda: not alive(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans only on Linux")
def test_children_of_a_killed_parent_are_ended_by_the_kernel(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib
from gateway.demo_children import Children
async def main():
    async with Children(pathlib.Path({str(tmp_path)!r})) as children:
        print((await children.start("child", {SLEEP!r})).process.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
