import asyncio
import logging
from pathlib import Path

import pytest

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway import housekeeping


async def test_a_chore_that_fails_is_logged_once_in_a_while_and_keeps_no_other_from_being_done(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "PULSE_S", 0.001)
    done: list[float] = []
    enough = asyncio.Event()

    def working(now: float) -> None:
        done.append(now)
        if len(done) == 3:
            enough.set()

    def broken(_: float) -> None:
        raise RuntimeError("no disk")

    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(housekeeping.pulse([broken, working]))
        await enough.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert done == sorted(done)
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["housekeeping_failed"]
    assert "broken" in caplog.text
    assert "no disk" in caplog.text


def test_requests_of_which_nothing_is_heard_leave_the_books_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    slot = fleet.add(Endpoint(name="e", address="10.0.0.1:8000"))
    books = Books(fleet, idle_timeout_s=10.0)
    books.reserve("lost", slot, 100, 400, 0.0)
    expire = housekeeping.expiry(books)
    expire(9.0)
    assert len(books) == 1
    expire(11.0)
    assert len(books) == 0
    assert "request_expired request_id=lost" in caplog.text


def test_a_file_that_changes_goes_or_comes_back_is_noticed_once_each(tmp_path: Path) -> None:
    file, acts = tmp_path / "c.yaml", []
    file.write_text("a")
    look = housekeeping.when_changed(file, lambda: acts.append(file.exists()))
    look(0.0)
    assert acts == []
    for change in (lambda: file.write_text("ab"), file.unlink, lambda: file.write_text("ab")):
        change()
        look(0.0)
        look(0.0)
    assert acts == [True, False, True]


def test_without_a_file_there_is_nothing_to_notice() -> None:
    acts: list[bool] = []
    look = housekeeping.when_changed(None, lambda: acts.append(True))
    look(0.0)
    look(1.0)
    assert acts == []
