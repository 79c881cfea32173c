from pathlib import Path

import msgspec
import pytest

from fleet.fleet import Adapters
from fleet.scrape import SGLANG, VLLM, Spec, parse, spec

PAGE = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",hash_block_size="None",num_gpu_blocks="1000",x="a,b={"} 1.0
vllm:cache_config_info{block_size="32",engine="1",hash_block_size="16",kv_cache_size_tokens="5000"} 1.0
vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 100.0
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a, b",waiting_lora_adapters="c"} 200.0
vllm:garbage this line is nobody's business
"""


@pytest.mark.parametrize("text", ["", "1abc", "name{label}", 'name{label="a}', "name{a=b", "a b"])
def test_a_malformed_spec_says_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a metric such as"):
        spec(text)


def test_specs_take_labels_quoted_or_not() -> None:
    assert spec("a:b") == Spec("a:b")
    assert spec(' x{a=1, b="two"} ') == Spec("x", (("a", "1"), ("b", "two")))


def test_a_malformed_line_that_is_read_is_an_error_and_any_other_is_not() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        parse("vllm:num_requests_waiting many\n", VLLM)
    assert parse("something else entirely {{{\n", VLLM) == {}


def test_ranks_are_told_apart_by_their_label() -> None:
    ranks = parse(PAGE, VLLM)
    assert sorted(ranks) == [0, 1]
    assert (ranks[0].waiting, ranks[0].running, ranks[0].kv_usage) == (3, 2, 0.25)
    assert (ranks[1].waiting, ranks[1].running, ranks[1].kv_usage) == (5, 4, 0.5)


def test_unset_labels_are_the_word_none_and_fall_back() -> None:
    ranks = parse(PAGE, VLLM)
    assert (ranks[0].block_tokens, ranks[0].kv_capacity_tokens) == (16, 16000)
    assert (ranks[1].block_tokens, ranks[1].kv_capacity_tokens) == (16, 5000)


def test_the_latest_adapter_series_is_the_one_that_holds() -> None:
    assert parse(PAGE, VLLM)[0].adapters == Adapters(frozenset({"a", "b"}), frozenset({"c"}), 2)


def test_what_the_page_does_not_have_is_none() -> None:
    (metrics,) = parse("vllm:num_requests_waiting 1\n", VLLM).values()
    assert metrics.waiting == 1
    assert (metrics.running, metrics.kv_usage, metrics.block_tokens, metrics.adapters) == (None, None, None, None)


def test_sglang_names_and_custom_specs() -> None:
    page = (
        'sglang:num_queue_reqs 7\nsglang:token_usage 0.5\nsglang:cache_config_info{page_size="64",num_pages="10"} 1\n'
    )
    (metrics,) = parse(page, SGLANG).values()
    assert (metrics.waiting, metrics.kv_usage, metrics.block_tokens, metrics.kv_capacity_tokens) == (7, 0.5, 64, 640)
    custom = msgspec.structs.replace(VLLM, custom=(("power", spec("gpu_watts{gpu=1}")),))
    assert parse('gpu_watts{gpu="0"} 5\ngpu_watts{gpu="1"} 7\n', custom)[0].custom == {"power": 7}


def test_a_page_of_a_real_engine_is_read(shared: Path) -> None:
    page = (shared / "captures" / "metrics_b16.txt").read_text()
    (metrics,) = parse(page, VLLM).values()
    assert (metrics.waiting, metrics.running, metrics.kv_usage) == (0, 0, 0)
    assert metrics.block_tokens == 16
    assert metrics.kv_capacity_tokens
