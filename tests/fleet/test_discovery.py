import asyncio
import os
from pathlib import Path

import pytest

from fleet.discovery import FileDiscovery, StaticDiscovery, difference
from fleet.endpoint import Endpoint
from fleet.endpoints_document import Entry


def document(*hosts: int) -> str:
    return "endpoints:\n" + "".join(f"- {{name: e{host}, address: 10.0.0.{host}}}\n" for host in hosts)


def watcher(path: Path, watch: bool = True) -> FileDiscovery:
    return FileDiscovery("file", FileDiscovery.Parameters(path=str(path), watch_file=watch), poll_s=0.01)


async def test_a_missing_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await anext(watcher(tmp_path / "none.yaml").changes())


async def test_changes_are_seen_and_an_unusable_file_keeps_the_old_fleet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(document(1))
    changes = watcher(path).changes()
    assert [endpoint.name for endpoint in (await anext(changes)).endpoints] == ["e1"]

    following = asyncio.ensure_future(anext(changes))
    path.write_text("endpoints: [")
    await asyncio.sleep(0.1)
    path.unlink()
    await asyncio.sleep(0.1)
    assert not following.done()
    assert "endpoints_file_unusable" in caplog.text

    replacement = tmp_path / "new.yaml"
    replacement.write_text(document(1, 2))
    os.replace(replacement, path)  # as editors and ConfigMaps do
    async with asyncio.timeout(5):
        assert [endpoint.name for endpoint in (await following).endpoints] == ["e1", "e2"]
    await changes.aclose()  # type: ignore[attr-defined]


async def test_without_watch_the_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(document(1, 2))
    assert len([found async for found in watcher(path, watch=False).changes()]) == 1


async def test_bad_entries_are_reported_with_the_good_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(document(1) + "- {name: bad}\n")
    found = await anext(watcher(path).changes())
    assert len(found.endpoints) == 1
    assert "`address`" in found.problems[0]
    assert "endpoint_skipped" in caplog.text


def test_a_bad_entry_in_the_configuration_itself_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"endpoints\[1\]\.address: expected an IP address"):
        StaticDiscovery.Parameters(endpoints=[Entry(name="a", address="10.0.0.1"), Entry(name="b", address="b")])


async def test_static_endpoints_are_found_once() -> None:
    parameters = StaticDiscovery.Parameters(endpoints=[Entry(name="a", address="10.0.0.1", data_parallel_size=2)])
    found = [found async for found in StaticDiscovery("static", parameters).changes()]
    assert [endpoint.name for endpoint in found[0].endpoints] == ["a-rank-0", "a-rank-1"]
    assert len(found) == 1


def test_the_difference_names_what_came_what_went_and_what_changed() -> None:
    stays = Endpoint(name="a", address="10.0.0.1:8000")
    goes = Endpoint(name="b", address="10.0.0.2:8000")
    before = Endpoint(name="c", address="10.0.0.3:8000")
    after = Endpoint(name="c", address="10.0.0.3:8000", labels={"zone": "x"})
    comes = Endpoint(name="a", address="10.0.0.1:8000", rank=1)
    found = difference([stays, goes, before], [stays, after, comes])
    assert (found.added, found.removed, found.changed) == ([comes], [goes], [(before, after)])
    assert not difference([stays], [stays])
