"""Recordings of real engines through the ingest path."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from event_ingest.events import BlockStored
from event_ingest.recording import Message, RecordingError, read, read_meta, write_line
from event_ingest.replaying import Report, replay_recording, replay_report_text, report_json
from event_ingest.vllm_wire import decode

SIZES = [None, 16, 32, 64, 128]


def play(folder: Path, name: str, block_tokens: int | None = None) -> Report:
    meta = folder / f"{name}.meta.json"
    return replay_recording(folder / f"{name}.jsonl", meta if meta.exists() else None, block_tokens)


def write(path: Path, *messages: Message) -> Path:
    path.write_text("".join(write_line(message) for message in messages))
    return path


# Files that are none


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"t": 1, "port": 2}', '{"t": 1, "port": 2, "frames": ["%"]}', '{"t": "x", "port": 2, "frames": []}'],
)
def test_a_line_that_is_no_message_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"t": 1.0, "port": 2, "frames": []}\n' + line + "\n")
    with pytest.raises(RecordingError, match=r"r\.jsonl: line 2: .*expected"):
        list(read(file))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"requests": 3}', '{"requests": [1]}'])
def test_a_meta_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(RecordingError, match=r"m\.json"):
        read_meta(file)


def test_messages_with_strange_frames_are_counted_and_nothing_else(tmp_path: Path, captures: Path) -> None:
    good = list(read(captures / "a_prefill_decode_b16.jsonl"))
    strange = [
        Message(1.0, good[0].port, frames) for frames in [(), (b"x",), (b"", b"1234567", b""), (b"a", b"b", b"c", b"d")]
    ]
    file = write(tmp_path / "r.jsonl", *strange, *good, *strange)
    report = replay_recording(file)
    assert report.skipped == {"bad_frames": 8}
    assert report.index.keys == 13


def test_writing_and_reading_agree(tmp_path: Path) -> None:
    messages = [
        Message(1.25, 5557, (b"topic", b"\0" * 8, b"payload")),
        Message(2.0, 5557, (b"", b"", b"\xff" * 8, b"")),
    ]
    assert list(read(write(tmp_path / "r.jsonl", *messages))) == messages
    assert [message.is_replay for message in messages] == [False, True]


# The recorded workload with the engine's own truth


@pytest.mark.parametrize("block_tokens", SIZES)
def test_every_request_of_the_recorded_workload_is_predicted_but_for_the_late_reset(
    captures: Path, block_tokens: int | None
) -> None:
    report = play(captures, "r_workload_truth_b16", block_tokens)
    assert (report.requests.total, report.requests.unknown, report.requests.under) == (80, 0, 0)
    assert report.requests.over == (1 if (block_tokens or 16) <= 32 else 0)
    late = [row for row in report.rows if row.outcome == "over"]
    assert all(row.notes == ("late_reset",) for row in late)
    assert report.skipped == {}
    assert {trust.state for trust in report.trust.values()} == {"exact"}
    meta = json.loads((captures / "r_workload_truth_b16.meta.json").read_text())
    size = block_tokens or 16
    for row in report.rows:
        request = meta["requests"][row.request]
        assert row.actual == request["cached_tokens"] // size * size
        assert row.predicted == row.actual or row in late


@pytest.mark.parametrize("block_tokens", [8, 24, 40, 48, 96])
def test_other_sizes_never_predict_more_than_the_engine_had(captures: Path, block_tokens: int) -> None:
    report = play(captures, "r_workload_truth_b16", block_tokens)
    assert (report.requests.exact, report.requests.over, report.requests.under) in [(79, 1, 0), (80, 0, 0)]


def test_the_report_is_stable_json(captures: Path) -> None:
    report = json.loads(report_json(play(captures, "r_workload_truth_b16", 16)))
    assert report["requests"] == {"total": 80, "exact": 79, "over": 1, "under": 0, "unknown": 0}
    assert report["events"] == {"AllBlocksCleared": 1, "BlockRemoved": 69, "BlockStored": 124}
    assert report["skipped"] == {}
    assert report["index"] == {"keys": 118, "entries": 118}
    assert report["trust"] == {"27557": {"state": "exact", "reason": "none", "detail": ""}}
    assert report["hashes"] == {"checked": 282, "wrong": 0, "unverifiable": 0}


def test_the_report_for_people_names_what_went_wrong(captures: Path) -> None:
    text = replay_report_text(play(captures, "r_workload_truth_b16", 16))
    assert "over: predicted 32, actual 0  late_reset" in text
    assert "exact 79" in text
    assert "(blocks of 16 tokens)" in text
    assert "index     118 different blocks, held 118 times" in text
    assert "stream    port 27557: exact  batches applied" in text
    assert "hashes    282 of the engine's computed again, 0 of them differ" in text


# All recordings


@pytest.mark.parametrize("block_tokens", SIZES)
def test_all_recordings_play_without_a_skip_and_with_right_hashes(shared: Path, block_tokens: int | None) -> None:
    checked = 0
    for file in sorted((shared / "captures").glob("*.jsonl")):
        report = play(shared / "captures", file.stem, block_tokens)
        assert report.skipped == {}, file.name
        assert report.hashes.wrong == 0, file.name
        assert report.requests.under == 0, file.name
        assert all(row.notes == ("late_reset",) for row in report.rows if row.outcome == "over"), file.name
        checked += report.hashes.checked
    assert checked >= 851


def stored_from(folder: Path, name: str, t0: float, t1: float, prompt: list[int]) -> int | None:
    """Where the engine began to store a prompt, by its own event: what it had cached before. Independent of all our state."""
    wanted = b"".join(token.to_bytes(4, "little") for token in prompt)
    for message in read(folder / f"{name}.jsonl"):
        batch = decode(message.frames[-1]).batch
        if batch is None or not t0 <= batch.ts <= t1:
            continue
        for event in batch.events:
            if isinstance(event, BlockStored) and event.tokens and event.kind == "full_attention":
                at = wanted.find(event.tokens)
                if at >= 0 and (event.parent is None) == (at == 0):
                    return at // 4
    return None


@pytest.mark.parametrize(
    "name",
    [
        "a_prefill_decode_b16",
        "b1_prefix_hit_b16",
        "c1_eviction_b16",
        "e1_cache_salt_b16",
        "e2_lora_b16",
        "f_sha256_cbor_b16_bytes",
        "g_restart_b16",
        "h_live_buffer4_b16",
        "p_hybrid_sliding_window_b16",
    ],
)
@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_predictions_agree_with_where_the_engine_began_to_store(captures: Path, name: str, block_tokens: int) -> None:
    report = play(captures, name, block_tokens)
    assert report.block_tokens == (16 if name.startswith("p_") else block_tokens)  # windows are judged in engine blocks
    entries = json.loads((captures / f"{name}.meta.json").read_text())["requests"]
    seen = 0
    for row in report.rows:
        entry = entries[row.request]
        actual = stored_from(captures, name, entry["t0"], entry["t1"], entry["prompt_token_ids"])
        if actual is not None:
            seen += 1
            assert row.predicted == actual // report.block_tokens * report.block_tokens, row
    assert seen


def test_a_recording_that_continues_another_is_exact_after_it(tmp_path: Path, captures: Path) -> None:
    names = ["c1_eviction_b16", "c2_duplicate_then_evict_b16"]
    file = tmp_path / "c.jsonl"
    file.write_text("".join((captures / f"{name}.jsonl").read_text() for name in names))
    meta = json.loads((captures / f"{names[0]}.meta.json").read_text())
    meta["requests"] += json.loads((captures / f"{names[1]}.meta.json").read_text())["requests"]
    (tmp_path / "c.meta.json").write_text(json.dumps(meta))
    report = play(tmp_path, "c")
    assert report.skipped == {}
    assert report.trust["27557"].state == "exact"
    assert report.streams["27557"]["unknown_removals"] == 0
    assert report.index.keys == 22  # 23 usable blocks, one of them a second copy
    assert report.streams["27557"]["second_copies"] == 2


def test_a_recording_that_begins_in_the_middle_says_so(captures: Path) -> None:
    report = play(captures, "c2_duplicate_then_evict_b16")
    assert report.skipped == {}
    assert report.trust["27557"].reason == "no_replay"
    assert report.streams["27557"]["unknown_removals"] == 22


def test_a_restart_leaves_what_the_second_process_holds(captures: Path) -> None:
    report = play(captures, "g_restart_b16")
    assert report.streams["27557"]["restarts"] == 1
    assert (report.index.keys, report.trust["27557"].state) == (14, "exact")


def test_ranks_are_streams_of_their_own(captures: Path) -> None:
    report = play(captures, "i_data_parallel2_b16")
    assert report.trust.keys() == {"27557", "27558"}
    assert report.index.entries == 22


def test_replay_answers_can_be_played() -> None:
    folder = Path(__file__).resolve().parent.parent / "data" / "captures"
    older = play(folder, "h_replay_older_than_buffer_b16")
    assert older.trust["27558"].reason == "lost_batches"
    assert older.streams["27558"]["orphans_waiting"] == 5
    assert play(folder, "h_replay_beyond_end_b16").index.keys == 0
    from10 = play(folder, "h_replay_from10_b16")
    assert from10.events == {"AllBlocksCleared": 1, "BlockStored": 17}
    assert from10.trust["27558"].state == "exact"  # the cache was cleared at its end


def test_a_replay_fills_the_hole_of_a_live_recording(tmp_path: Path, captures: Path) -> None:
    live = list(read(captures / "a_prefill_decode_b16.jsonl"))
    answer = [Message(m.t, m.port, (b"", *m.frames)) for m in live]
    end = Message(live[-1].t, live[-1].port, (b"", b"", b"\xff" * 8, b""))
    file = write(tmp_path / "r.jsonl", live[0], *live[3:], *answer, end)
    report = replay_recording(file)
    assert (report.index.keys, report.trust["27557"].state) == (13, "exact")
    assert report.events == {"BlockStored": 8}


# Judging


def meta_with(tmp_path: Path, captures: Path, change: Callable[[list[dict[str, object]]], None]) -> Report:
    meta = json.loads((captures / "b1_prefix_hit_b16.meta.json").read_text())
    change(meta["requests"])
    (tmp_path / "b.meta.json").write_text(json.dumps(meta))
    return replay_recording(captures / "b1_prefix_hit_b16.jsonl", tmp_path / "b.meta.json")


def test_wrong_reports_are_called_over_and_under(tmp_path: Path, captures: Path) -> None:
    def change(requests: list[dict[str, object]]) -> None:
        requests[0]["cached_tokens"] = 0
        requests[1]["cached_tokens"] = 48
        requests[2]["cached_tokens"] = 64
        requests[3]["usage"] = {"prompt_tokens_details": {"cached_tokens": 64}}

    report = meta_with(tmp_path, captures, change)
    assert [row.outcome for row in report.rows] == ["exact", "over", "under", "exact"]


def test_what_cannot_be_judged_says_why(tmp_path: Path, captures: Path) -> None:
    def change(requests: list[dict[str, object]]) -> None:
        requests[0]["prompt_token_ids"] = None
        del requests[1]["t0"]

    report = meta_with(tmp_path, captures, change)
    assert [row.notes[0] for row in report.rows[:3]] == [
        "no prompt token ids",
        "no time of sending",
        "the engine's cached_tokens are not in the meta file",
    ]
    assert report.requests.unknown == 4


def test_a_mismatch_of_hashes_is_named(tmp_path: Path, captures: Path) -> None:
    meta = json.loads((captures / "a_prefill_decode_b16.meta.json").read_text())
    meta["engine"]["env"]["PYTHONHASHSEED"] = "0"
    (tmp_path / "a.meta.json").write_text(json.dumps(meta))
    report = replay_recording(captures / "a_prefill_decode_b16.jsonl", tmp_path / "a.meta.json")
    assert report.hashes.wrong == 1
    assert report.mismatch == "hashes are sha256, PYTHONHASHSEED 42; configured: sha256, PYTHONHASHSEED 0"
    assert msgspec.json.decode(report_json(report))["mismatch"] == report.mismatch
