import msgspec

from indexer import engine_hash
from simulator.hash_chain import HashChain, HashRecipe, Lora
from simulator.kv_events import Cleared, KvEvent, Removed
from simulator.pool import BlockPool
from simulator.wire import WireFormat, encode_batch

RECIPE = HashRecipe.of("sha256", "42", 16)


def stored(lora: Lora | None = None, salt: str | None = None, session_id: str | None = None) -> KvEvent:
    pool = BlockPool(9)
    chain = HashChain(RECIPE, range(1, 33), lora=lora, salt=salt)
    pool.store(chain, pool.allocate(2), 0, 2, session_id)
    return pool.take_events()[0]


def test_a_batch_is_an_array_of_time_events_and_rank() -> None:
    ts, events, rank = msgspec.msgpack.decode(encode_batch([Cleared()], 12.5, rank=3))
    assert (ts, events, rank) == (12.5, [{"type": "AllBlocksCleared"}], 3)


def test_a_store_in_map_form_has_the_fields_of_0_32_and_the_hashes_of_a_real_engine() -> None:
    (event,) = msgspec.msgpack.decode(encode_batch([stored()], 0.0))[1]
    assert event == {
        "type": "BlockStored",
        "block_hashes": [4508471921923631364, 13026579715664180657],
        "parent_block_hash": None,
        "token_ids": list(range(1, 33)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_extra_keys_are_published_without_tags_and_without_the_adapter_path() -> None:
    event = stored(Lora("ad1", "/adapters/ad1", 1), "s1", "chat-7")
    (sent,) = msgspec.msgpack.decode(encode_batch([event], 0.0))[1]
    assert sent["extra_keys"] == [["ad1", "s1"], ["ad1"]]
    assert (sent["lora_id"], sent["lora_name"], sent["session_id"]) == (1, "ad1", "chat-7")
    assert sent["block_hashes"][0] == 5487723747786799860


def test_the_array_form_puts_the_tag_first_and_keeps_the_order_of_fields() -> None:
    events = [stored(), Removed(b"\x01" * 32), Cleared()]
    first, second, third = msgspec.msgpack.decode(encode_batch(events, 0.0, form=WireFormat(arrays=True)))[1]
    assert first[0] == "BlockStored"
    assert first[2:9] == [None, list(range(1, 33)), 16, None, "GPU", None, [None, None]]
    assert second == ["BlockRemoved", [0x0101010101010101], "GPU", 0]
    assert third == ["AllBlocksCleared"]


def test_whole_digests_are_sent_as_bytes_that_end_in_the_integer_form() -> None:
    event = stored()
    (sent,) = msgspec.msgpack.decode(encode_batch([event], 0.0, form=WireFormat(whole_digests=True)))[1]
    assert [len(digest) for digest in sent["block_hashes"]] == [32, 32]
    assert engine_hash.wire(sent["block_hashes"][0]) == 4508471921923631364
