"""vLLM's hashes: published vectors, recorded events of real engines, and the traps on the way."""

import base64
import hashlib
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from indexer.engine_hash import (
    Algorithm,
    UnknownSeedError,
    algorithm,
    block_hash,
    block_hashes,
    none_hash,
    normalise,
    unsigned,
    wire,
)
from indexer.extra_keys import ExtraKeys, from_event

B0, B1 = list(range(1, 17)), list(range(17, 33))

# Computed with vLLM 0.32's own functions: seed "42", block 16; B0 as root, B1 after it, B0 with extra keys.
VECTORS = {
    "sha256": (
        4508471921923631364,
        13026579715664180657,
        8193960582572129114,
        14667270365616251430,
        5487723747786799860,
        12760172126223405326,
    ),
    "sha256_cbor": (
        16300212363532267629,
        8671309795006503672,
        18004764957418570026,
        1712330141327384077,
        13010934627428155674,
        1978736101419962764,
    ),
    "xxhash": (
        3721381939863447827,
        5535045439232338803,
        199680711301698719,
        17367569689245354994,
        1308843498968168031,
        1841328786283339604,
    ),
    "xxhash_cbor": (
        14255326629130133946,
        8320077250611386183,
        765971647540944283,
        2312365883003756819,
        5898025203967708007,
        389003042439043974,
    ),
}
SALT = ExtraKeys(salt="tenant-a")
LORA = ExtraKeys(lora=("ad1", "/adapters/ad1"))
LORA_SALT = ExtraKeys(lora=("ad1", "/adapters/ad1"), salt="s1")
MEDIA = ExtraKeys(media=(("img-0", 4),))


def test_an_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'md5'; one of sha256, sha256_cbor, xxhash, xxhash_cbor"):
        algorithm("md5")


@pytest.mark.parametrize("name", ["xxhash", "xxhash_cbor"])
def test_an_xxhash_engine_without_a_seed_cannot_be_recomputed(name: str) -> None:
    with pytest.raises(UnknownSeedError, match="set PYTHONHASHSEED"):
        none_hash(name, None)


@pytest.mark.parametrize("bad", [b"1234567", 1 << 64, -(1 << 63) - 1])
def test_a_hash_of_another_size_is_refused(bad: int | bytes) -> None:
    with pytest.raises(ValueError, match=r"64 bits|at least 8"):
        normalise(bad)


@pytest.mark.parametrize("name", VECTORS)
def test_hashes_are_those_of_vllm(name: str) -> None:
    parent = none_hash(name, "42")
    root = block_hash(name, parent, B0)
    computed = (
        root,
        block_hash(name, root, B1),
        *(block_hash(name, parent, B0, extra) for extra in (SALT, LORA, LORA_SALT, MEDIA)),
    )
    assert tuple(map(wire, computed)) == VECTORS[name]
    assert block_hashes(name, parent, np.array([*B0, *B1, 99], dtype=np.uint32), 16) == list(computed[:2])
    assert block_hash(name, parent, B0, ExtraKeys()) == root


@pytest.mark.parametrize(
    ("name", "seed", "start"),
    [
        ("sha256", None, "066b1e8987e02713"),
        ("sha256_cbor", None, "9bd96a485ad84efd"),
        ("sha256", "0", "1973e23848344dc4"),
        ("sha256_cbor", "0", "4e1195df020de59e"),
        ("xxhash", "0", "6fb31cc38bba6066183f7f2104b9c051"),
        ("xxhash_cbor", "0", "1ebe36576dcb573f26b99533a20aaeca"),
        ("sha256", "42", "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a"),
        ("sha256_cbor", "42", "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780"),
        ("xxhash", "42", "b6cdd80ea04b31ad0b9fc22fff500882"),
        ("xxhash_cbor", "42", "a9d2e63407fce1a26c9dc9d7fa2d7caf"),
    ],
)
def test_the_hash_of_no_parent_follows_the_seed(name: str, seed: str | None, start: str) -> None:
    assert none_hash(name, seed).hex().startswith(start)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("sha256", 1403909460543360175, 1643945449041937783),
        ("sha256_cbor", 8866452693264111234, 807986237951177663),
    ],
)
def test_the_sha256_family_has_a_fixed_default_seed(name: str, first: int, second: int) -> None:
    assert list(map(wire, block_hashes(name, none_hash(name, None), B0 + B1, 16))) == [first, second]


# The pickle trap


def serialised(extra: ExtraKeys, monkeypatch: pytest.MonkeyPatch) -> bytes:
    written: list[bytes] = []
    dumps = pickle.dumps

    def spy(value: object, protocol: int) -> bytes:
        written.append(dumps(value, protocol=protocol))
        return written[-1]

    monkeypatch.setattr(pickle, "dumps", spy)
    block_hash("sha256", b"\x00" * 32, [1], extra)
    return written[0]


def strings_in(pickled: bytes) -> list[str]:
    return [arg for code, arg, _ in pickletools.genops(pickled) if code.name == "SHORT_BINUNICODE"]


def test_equal_strings_are_written_twice_even_if_the_caller_passes_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "same-name"
    pickled = serialised(ExtraKeys(lora=(name, name), salt=name), monkeypatch)
    assert strings_in(pickled) == ["lora", name, name, "cache_salt", name]


def test_a_name_that_equals_a_tag_is_written_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strings_in(serialised(ExtraKeys(lora=("lora", "lora")), monkeypatch)) == ["lora", "lora", "lora"]


def test_a_tag_is_one_object_of_the_engines_program_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = serialised(ExtraKeys(media=(("img-0", 0), ("img-0", 8))), monkeypatch)
    assert strings_in(pickled) == ["mm", "img-0", "img-0"]


def test_one_object_and_two_equal_objects_really_pickle_differently() -> None:
    """Why the trap matters: the digests differ, so a naive implementation is wrong now and then."""
    one = "same-name"
    other = one.encode().decode()
    assert pickle.dumps((one, one), protocol=5) != pickle.dumps((one, other), protocol=5)


def test_a_block_is_serialised_as_documented() -> None:
    parent = none_hash("sha256", "42")
    expected = (
        "8005954a000000000000004320c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a94284b014b024b034b04"
        "4b054b064b074b084b094b0a4b0b4b0c4b0d4b0e4b0f4b1074944e87942e"
    )
    assert pickle.dumps((parent, tuple(B0), None), protocol=5).hex() == expected


# The wire


def test_signed_values_become_unsigned() -> None:
    assert normalise(-1) == 2**64 - 1
    assert normalise(5) == 5
    assert normalise(2**64 - 1) == 2**64 - 1
    assert unsigned([-1, 0, 1]) == [2**64 - 1, 0, 1]


def test_a_full_digest_and_its_int_form_are_the_same_hash() -> None:
    digest = bytes.fromhex("5e89b9ac16b9c1ef5be07c00aab2f7cdd3366235898a4d843c901c1915e4cb23")
    assert normalise(digest) == wire(digest) == 4364018932989086499


# Extra keys as events carry them


@pytest.mark.parametrize("entry", [[1.5], [["img"]], ["s1", "s2"], [["img", "x"]], [{"a": 1}]])
def test_an_extra_key_of_another_shape_is_refused(entry: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected a salt"):
        from_event(entry, lora_name=None, lora_path=None)


def test_an_adapter_without_a_path_cannot_be_hashed() -> None:
    with pytest.raises(ValueError, match="path of LoRA adapter 'ad1' is unknown"):
        from_event(["ad1"], lora_name="ad1", lora_path=None)


@pytest.mark.parametrize(
    ("entry", "lora", "expected"),
    [
        (None, None, None),
        ([], None, None),
        (["s1"], None, ExtraKeys(salt="s1")),
        (["ad1"], "ad1", ExtraKeys(lora=("ad1", "p"))),
        (["ad1", "s1"], "ad1", ExtraKeys(lora=("ad1", "p"), salt="s1")),
        (["ad1", "ad1"], "ad1", ExtraKeys(lora=("ad1", "p"), salt="ad1")),
        ([["img-0", -4], "s1"], None, ExtraKeys(media=(("img-0", -4),), salt="s1")),
        ([b"digest"], None, ExtraKeys(prompt_embeds=(b"digest",))),
    ],
)
def test_tags_are_put_back(entry: list[Any] | None, lora: str | None, expected: ExtraKeys | None) -> None:
    assert from_event(entry, lora_name=lora, lora_path="p" if lora else None) == expected


# Recordings of real engines


def stored_blocks(path: Path) -> list[dict[str, Any]]:
    events = []
    for line in path.read_text().splitlines():
        payload = base64.b64decode(json.loads(line)["frames"][-1])
        events += [event for event in msgspec.msgpack.decode(payload)[1] if event["type"] == "BlockStored"]
    return events


def settings_of(meta: dict[str, Any]) -> tuple[Algorithm, str | None]:
    arguments = meta["engine"]["args"]
    flag = "--prefix-caching-hash-algo"
    name = arguments[arguments.index(flag) + 1] if flag in arguments else "sha256"
    return algorithm(name), meta["engine"]["env"].get("PYTHONHASHSEED")


# Streams that begin at their first block and whose every parent is in the same file.
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("a_prefill_decode_b16", 13),
        ("a2_exact_block_end_b16", 4),
        ("c1_eviction_b16", 30),
        ("e1_cache_salt_b16", 9),
        ("e2_lora_b16", 13),
        ("f_sha256_cbor_b16", 30),
        ("f_sha256_cbor_b16_bytes", 30),
        ("f_sha256_b64_noseed", 6),
        ("f_xxhash_b64", 6),
        ("f_xxhash_cbor_b128", 3),
        ("g_restart_b16", 10),
        ("i_data_parallel2_b16", 10),
        ("j_preemption_b16", 30),
        ("k_chunked_prefill_b16", 62),
        ("l_duplicate_concurrent_b16", 12),
        ("q_nixl_prefill_b16", 10),
        ("q_nixl_decode_b16", 10),
        ("r_workload_truth_b16", 282),
    ],
)
def test_every_hash_a_real_engine_published_is_recomputed(shared: Path, name: str, least: int) -> None:
    meta = json.loads((shared / "captures" / f"{name}.meta.json").read_text())
    algo, seed = settings_of(meta)
    paths = meta.get("lora_paths", {})
    digests: dict[int, bytes] = {}
    checked = 0
    for event in stored_blocks(shared / "captures" / f"{name}.jsonl"):
        parent = event["parent_block_hash"]
        digest = none_hash(algo, seed) if parent is None else digests[normalise(parent)]
        lora = event["lora_name"]
        extra = [from_event(entry, lora_name=lora, lora_path=paths.get(lora)) for entry in event["extra_keys"]]
        computed = block_hashes(algo, digest, event["token_ids"], event["block_size"], extra)
        assert list(map(wire, computed)) == [normalise(value) for value in event["block_hashes"]]
        if isinstance(event["block_hashes"][0], bytes):
            assert computed == event["block_hashes"]
        digests.update((wire(value), value) for value in computed)
        checked += len(computed)
    assert checked >= least


def test_published_digests_of_recorded_blocks(shared: Path) -> None:
    first = stored_blocks(shared / "captures" / "a_prefill_decode_b16.jsonl")[0]
    digests = block_hashes("sha256", none_hash("sha256", "42"), first["token_ids"], 16)
    assert digests[0].hex() == "9f7080afdbbf40b2711feff2ed86d556d818f41ed58ca0596cc5ade0d6866db1"
    assert digests[1].hex() == "00a0473d514ac36d1c860e0a6f74accd37bd68e6c6c67f8ad4a554f7ba256362"
    assert wire(digests[0]) == 7837861907691630001
    salted = stored_blocks(shared / "captures" / "e1_cache_salt_b16.jsonl")
    assert [event["block_hashes"][:2] for event in salted] == [
        [16787903595225217424, 9710217008168276005],
        [5696370020206378143, 10854516584708410894],
        [188701373912197496, 10251360152727720962],
    ]


# Vectors of recorded blocks that need no recording at hand.


def test_a_recorded_sha256_chain_of_two_blocks() -> None:
    tokens = (
        "18611 75606 9271 34432 16455 65937 59915 62898 86405 50756 28519 13302 64944 4715 52093 57723 "
        "80618 1276 92204 59377 35908 95573 30984 78483 14399 42606 5009 3925 4335 86137 71964 2206"
    )
    chain = block_hashes("sha256", none_hash("sha256", "42"), list(map(int, tokens.split())), 16)
    assert [wire(digest) for digest in chain] == [7837861907691630001, 15322746730154648418]


def test_a_recorded_sha256_cbor_block() -> None:
    tokens = "41344 38148 76754 21203 35815 31100 64374 62239 44584 6396 13083 88269 25308 21190 52108 7086"
    digest = block_hash("sha256_cbor", none_hash("sha256_cbor", "42"), list(map(int, tokens.split())))
    assert digest.hex() == "5e89b9ac16b9c1ef5be07c00aab2f7cdd3366235898a4d843c901c1915e4cb23"


@pytest.mark.parametrize(
    ("name", "seed", "first", "second", "digest"),
    [
        (
            "f_sha256_b64_noseed",
            None,
            1183352216371613728,
            5883573484747100035,
            "3841a4053a9613ac498c43d51b9605c6a3cee85c0e6c0186106c1c9235005020",
        ),
        ("f_xxhash_b64", "42", 4578860612515568729, 11670887157877503270, "46db88ad483c41c03f8b61779d049c59"),
        ("f_xxhash_cbor_b128", "42", 1195215820585338646, 17720808280117256288, "e1ad01881a707c8b10964274cfea8716"),
    ],
)
def test_published_digests_of_the_other_algorithms(
    shared: Path, name: str, seed: str | None, first: int, second: int, digest: str
) -> None:
    event = stored_blocks(shared / "captures" / f"{name}.jsonl")[0]
    algo, recorded_seed = settings_of(json.loads((shared / "captures" / f"{name}.meta.json").read_text()))
    assert recorded_seed == seed
    chain = block_hashes(algo, none_hash(algo, seed), event["token_ids"], event["block_size"])
    assert chain[0].hex() == digest
    assert [wire(value) for value in chain[:2]] == [first, second] == event["block_hashes"][:2]


def test_a_block_is_written_as_canonical_cbor() -> None:
    parent = none_hash("sha256_cbor", "42")
    assert hashlib.sha256(bytes.fromhex("623432")).digest() == parent
    written = "8358209fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780900102030405060708090a0b0c0d0e0f10"
    salted = written + "81826a63616368655f73616c746874656e616e742d61"
    assert block_hash("sha256_cbor", parent, B0) == hashlib.sha256(bytes.fromhex(written + "f6")).digest()
    assert block_hash("sha256_cbor", parent, B0, SALT) == hashlib.sha256(bytes.fromhex(salted)).digest()
