"""`warmroute hash` and `warmroute events replay` on input that holds nothing to answer with."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from event_ingest.recording import Message, write_line
from gateway.cli import cli


def run(*arguments: str, given: str = "") -> Result:
    return CliRunner().invoke(cli, arguments, input=given)


@pytest.mark.parametrize(
    ("arguments", "given", "count", "block"),
    [
        (("1", "2", "3"), "", 3, 16),
        (("1", "2", "3", "--json"), "", 3, 16),
        (("1,2,3", "--block-size", "4", "--algorithm", "sha256_cbor"), "", 3, 4),
        (("-",), "", 0, 16),
    ],
)
def test_fewer_ids_than_a_block_have_no_hash(arguments: tuple[str, ...], given: str, count: int, block: int) -> None:
    result = run("hash", *arguments, given=given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{count} token ids do not fill one block of {block}" in result.stderr
    assert f"give at least {block} ids" in result.stderr


def test_one_full_block_is_enough() -> None:
    result = run("hash", "1", "2", "3", "4", "--block-size", "4", "--algorithm", "sha256_cbor", "--seed", "0")
    assert result.exit_code == 0
    assert "sha256_cbor" in result.stdout


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_recording_without_a_message_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text(text)
    result = run("events", "replay", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{file} holds no messages" in result.stderr


def test_nothing_to_replay_is_said_of_a_device_too() -> None:
    assert "/dev/null holds no messages" in run("events", "replay", "/dev/null").stderr


def test_a_recording_with_a_message_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(write_line(Message(1.0, 5557, (b"", (0).to_bytes(8, "big"), b"\x93\xcb" + bytes(8) + b"\x90\x00"))))
    result = run("events", "replay", str(file))
    assert result.exit_code == 0, result.stderr
    assert result.stdout
