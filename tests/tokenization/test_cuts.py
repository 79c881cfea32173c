"""The safe-cut rule: pieces encoded one by one give the ids of the whole, and tokenizers that break this are refused."""

import copy
import json
import os
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenization.adversarial import Chats
from tests.tokenization.conftest import load, qwen3_spec, reference
from tokenization.cuts import hard_tokens, split_before, turn_token
from tokenization.encoders import FastokensEncoder, ReferenceEncoder
from tokenization.local import LocalTokenizer
from tokenization.segments import SegmentedEncoder

CHATS_PER_TOKENIZER = int(os.environ.get("WARMROUTE_ADVERSARIAL_CHATS", "2000"))
START, END = "<|im_start|>", "<|im_end|>"

Spec = dict[str, Any]


def _changed(**token_fields: Any) -> Spec:
    spec = {**qwen3_spec(), "added_tokens": copy.deepcopy(qwen3_spec()["added_tokens"])}
    for token in spec["added_tokens"]:
        token.update(token_fields)
    return spec


def _with_token(content: str, **fields: Any) -> Spec:
    spec = _changed()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"].append({"id": 151669, "content": content, **flags, "special": True, **fields})
    return spec


def _mismatches(spec: Spec, cut_tokens: list[str], chats: int = 300) -> int:
    """Chats whose pieces, cut before `cut_tokens`, do not encode to the whole's ids."""
    encoder = ReferenceEncoder(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    specials = [token["content"] for token in spec["added_tokens"]]
    texts = Chats(specials, START, END, seed=5).take(chats)
    segmented = SegmentedEncoder(encoder, cut_tokens, max_bytes=1 << 26)
    return sum(
        not np.array_equal(segmented.encode(text)[0], ids)
        for text, ids in zip(texts, encoder.encode(texts), strict=True)
    )


# What must be refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "breaks"),
    [({"normalized": True}, True), ({"lstrip": True}, True), ({"single_word": True}, True), ({"rstrip": True}, False)],
)
def test_tokens_that_reach_beyond_themselves_are_no_cuts(fields: dict[str, Any], breaks: bool) -> None:
    spec = _changed(**fields)
    assert hard_tokens(spec) == frozenset()
    # The control must be one: cut anyway and it goes wrong. (A token that strips to its right harms only cuts after it.)
    everything = [token["content"] for token in spec["added_tokens"]]
    assert (_mismatches(spec, everything, 3000 if fields.get("normalized") else 300) > 0) == breaks


def test_a_token_whose_edge_another_token_can_begin_with_is_no_cut() -> None:
    spec = _with_token("|><|im")
    hard = hard_tokens(spec)
    assert len(hard) == 6  # those without "<|" and "|>" at their edges
    assert START not in hard
    assert _mismatches(spec, [START], 3000) > 0
    assert _mismatches(spec, sorted(hard)) == 0


def test_a_token_inside_of_another_is_no_cut() -> None:
    assert START not in hard_tokens(_with_token(f"x{START}y"))


def test_a_token_that_can_overlap_itself_is_no_cut() -> None:
    assert "abab" not in hard_tokens(_with_token("abab"))


def test_word_boundaries_of_other_tokens_forbid_cuts_at_word_characters_underscore_included() -> None:
    spec = _with_token("zqfoo", single_word=True)
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 151670, "content": "_T_", "single_word": False})
    hard = hard_tokens(spec)
    assert "_T_" not in hard
    assert START in hard
    encoder = ReferenceEncoder(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    pieces = SegmentedEncoder(encoder, ["_T_"], max_bytes=1 << 20).encode("zqfoo_T_ x")[0]
    assert not np.array_equal(pieces, encoder.encode(["zqfoo_T_ x"])[0])


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}},
        {"padding": {"strategy": "BatchLongest"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
)
def test_whatever_depends_on_the_whole_text_forbids_all_cuts(change: Spec) -> None:
    assert hard_tokens({**qwen3_spec(), **change}) == frozenset()


def test_a_newline_is_no_cut() -> None:
    assert _mismatches(qwen3_spec(), ["\n"], 1000) > 0


def test_without_a_safe_token_prompts_are_encoded_as_a_whole() -> None:
    from tokenization.model_files import ModelFiles

    spec = json.dumps(_changed(lstrip=True))
    template = {"default": load("qwen3").template.source}  # type: ignore[union-attr]
    local = LocalTokenizer(ModelFiles(tokenizer=spec, templates=template, special_tokens={}), encoder="tokenizers")
    assert local.cut_token is None
    result = local.tokenize("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello "}]})
    assert result.boundaries == ()
    assert len(result.token_ids) > 3


# What must be found -----------------------------------------------------------------------------------------------


def test_all_added_tokens_of_the_three_models_are_hard(tokenizer: LocalTokenizer, model: str) -> None:
    assert len(tokenizer.hard_tokens) == {"qwen3": 26, "qwen2_5": 22, "llama3_1": 256}[model]


def test_a_normalizer_that_does_nothing_allows_normalized_tokens() -> None:
    spec = _changed(normalized=True)
    assert len(hard_tokens({**spec, "normalizer": None})) == 26
    assert len(hard_tokens({**spec, "normalizer": {"type": "Sequence", "normalizers": []}})) == 26


def _metaspace(scheme: str) -> Spec:
    merges = ["\u2581 a", "a b", "\u2581 ab"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "a": 4, "b": 5, "\u2581a": 6, "ab": 7, "\u2581ab": 8}
    added = [
        {
            "id": i,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "vocab": vocabulary, "merges": merges},
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_cutting_before_a_token_is_exact_with_metaspace_too(scheme: str) -> None:
    spec = _metaspace(scheme)
    assert hard_tokens(spec) == {"<unk>", "<s>", "</s>"}
    encoder = ReferenceEncoder(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    segmented = SegmentedEncoder(encoder, ["<s>", "</s>"], max_bytes=1 << 20)
    texts = ["ab<s>ab</s> ab", "<s>ab", "</s><s>", " a b<s> ab", "ab"]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert segmented.encode(text)[0].tolist() == ids.tolist()


@pytest.mark.parametrize("cuts", ["turns", "every hard token"])
def test_segments_equal_the_whole_on_adversarial_chats(
    tokenizer: LocalTokenizer, slow: tokenizers.Tokenizer, model: str, cuts: str
) -> None:
    start, end = ("<|start_header_id|>", "<|eot_id|>") if model.startswith("llama") else (START, END)
    specials = [*sorted(tokenizer.hard_tokens)[:40], start, end]
    texts = Chats(specials, start, end, seed=len(cuts)).take(CHATS_PER_TOKENIZER)
    whole = ReferenceEncoder(slow).encode(texts)
    tokens = [str(tokenizer.cut_token)] if cuts == "turns" else sorted(tokenizer.hard_tokens)
    segmented = SegmentedEncoder(tokenizer.segments.encoder, tokens, max_bytes=1 << 24)
    for text, ids in zip(texts, whole, strict=True):
        assert np.array_equal(segmented.encode(text)[0], ids), repr(text)


def test_both_libraries_agree_on_adversarial_chats(tokenizer: LocalTokenizer, slow: tokenizers.Tokenizer) -> None:
    assert isinstance(tokenizer.segments.encoder, FastokensEncoder)
    texts = Chats(sorted(tokenizer.hard_tokens)[:40], START, END, seed=9).take(CHATS_PER_TOKENIZER)
    for ours, theirs in zip(
        tokenizer.segments.encoder.encode(texts), ReferenceEncoder(slow).encode(texts), strict=True
    ):
        assert np.array_equal(ours, theirs)


# The rule as a law: small vocabularies in which everything overlaps ------------------------------------------------

_content = st.text(alphabet="ab_<", min_size=1, max_size=4)
_token = st.fixed_dictionaries(
    {"content": _content, **{name: st.booleans() for name in ("single_word", "lstrip", "rstrip", "normalized")}}
)


@settings(max_examples=300, deadline=None)
@given(
    added=st.lists(_token, min_size=1, max_size=5, unique_by=lambda token: token["content"]),
    normalizer=st.sampled_from([None, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "b"}]),
    texts=st.lists(st.text(alphabet="ab_< A", max_size=16), min_size=1, max_size=6),
)
def test_no_vocabulary_makes_a_hard_token_an_unsafe_cut(
    added: list[Spec], normalizer: Spec | None, texts: list[str]
) -> None:
    vocabulary = {text: i for i, text in enumerate(["a", "b", "_", "<", " ", "A", "ab", "aa", "<a", "b_"])}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 100 + i, "special": True, **token} for i, token in enumerate(added)],
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b", "a a", "< a", "b _"]},
    }
    hard = sorted(hard_tokens(spec))
    encoder = ReferenceEncoder(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    segmented = SegmentedEncoder(encoder, hard, max_bytes=1 << 16)
    texts = [*texts, *(a + token + b for token in hard for a in texts[:2] for b in texts[:2])]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert segmented.encode(text)[0].tolist() == ids.tolist()


@given(
    text=st.text(alphabet="ab<", max_size=30),
    tokens=st.lists(st.text(alphabet="ab<", min_size=1, max_size=3), max_size=3),
)
def test_pieces_concatenate_to_the_text_and_begin_with_a_token(text: str, tokens: list[str]) -> None:
    pieces = split_before(text, tokens)
    assert "".join(pieces) == text
    cuts = np.cumsum([len(piece) for piece in pieces])[:-1].tolist()
    assert all(text.startswith(tuple(tokens), cut) for cut in cuts)
    assert "" not in pieces


def test_the_turn_token_is_the_first_one_that_repeats() -> None:
    hard = frozenset(("<s>", "<turn>", "<end>"))
    assert turn_token(hard, "<s><turn>a<end><turn>b<end>", repeats=2) == "<turn>"
    assert turn_token(hard, "<s>a b", repeats=2) is None


def test_the_reference_library_is_loaded_from_the_same_file() -> None:
    assert reference("qwen3").get_vocab_size() == 151669
