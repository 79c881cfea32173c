from typing import Any

import pytest

from fleet.endpoint import Endpoint
from gateway.burst_producer import BurstPrefixCacheProducer
from gateway.config_decode import Decoder
from gateway.config_source import read
from gateway.joint_placement import Rules
from gateway.producers_config import (
    ApproxPrefixCacheProducer,
    PrecisePrefixCacheProducer,
    TokenProducer,
)


def made(kind: Any, text: str) -> Any:
    source = read(text, "c.yaml")
    decoder = Decoder(source)
    parameters = decoder.decode(source.value, kind.Parameters, (), any_case=True)
    assert parameters is not None, [str(problem) for problem in decoder.problems]
    return kind("p", parameters)


def refused(kind: Any, text: str) -> str:
    source = read(text, "c.yaml")
    decoder = Decoder(source)
    assert decoder.decode(source.value, kind.Parameters, (), any_case=True) is None
    return str(decoder.problems[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{indexerConfig: {tokenizersPoolConfig: {}}}", "tokenizers belong to a token-producer plugin"),
        ("{tokenProcessorConfig: {blockSize: 16, blockSizeTokens: 32}}", "blockSize is the older spelling"),
        ("{indexerConfig: {kvCacheBackendConfigs: [{name: gpu, weight: 2}]}}", "expected float <= 1.0"),
        ("{kvEventsConfig: {engineType: trtllm}}", "expected one of 'vllm', 'sglang'"),
        ("{speculativeTTL: 2}", "expected a duration"),
    ],
)
def test_what_the_precise_producer_cannot_do_is_said(text: str, message: str) -> None:
    assert message in refused(PrecisePrefixCacheProducer, text)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("{}", None),
        ("{tokenProcessorConfig: {blockSizeTokens: 0}}", None),
        ("{tokenProcessorConfig: {blockSize: 64}}", 64),
        ("{tokenProcessorConfig: {blockSizeTokens: 32}}", 32),
        ("{indexerConfig: {tokenProcessorConfig: {blockSizeTokens: 5}}}", 5),
    ],
)
def test_the_block_size_is_the_engines_unless_given(text: str, block: int | None) -> None:
    assert made(PrecisePrefixCacheProducer, text).block_tokens == block


def test_index_limits_are_given_as_a_number_of_keys_or_as_bytes() -> None:
    index = "{{indexerConfig: {{kvBlockIndexConfig: {}}}}}"
    assert made(PrecisePrefixCacheProducer, "{}").max_keys is None
    limited = made(PrecisePrefixCacheProducer, index.format("{inMemoryConfig: {size: 1000000, podCacheSize: 10}}"))
    assert (limited.max_keys, limited.max_holders) == (1_000_000, 10)
    assert (
        made(PrecisePrefixCacheProducer, index.format('{costAwareMemoryConfig: {size: "2GiB"}}')).max_keys
        == 2**31 // 200
    )


def test_streams_follow_the_ports_of_pod_discovery_and_the_rank() -> None:
    endpoint = Endpoint(name="e", address="10.0.0.1:8000", rank=2)
    events = "{{kvEventsConfig: {}}}"
    assert made(PrecisePrefixCacheProducer, "{}").stream_of(endpoint) == ("tcp://10.0.0.1:5559", None)
    both = made(
        PrecisePrefixCacheProducer, events.format("{podDiscoveryConfig: {socketPort: 6000, replaySocketPort: 7000}}")
    )
    assert both.stream_of(endpoint) == ("tcp://10.0.0.1:6002", "tcp://10.0.0.1:7002")
    for off in ("{discoverPods: false}", "{zmqEndpoint: 'tcp://0.0.0.0:5557'}"):
        assert made(PrecisePrefixCacheProducer, events.format(off)).stream_of(endpoint) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{}", "models"),
        ("{modelName: m}", "vllm"),
        ("{modelName: m, vllm: {url: 'http://h'}}", "vllm"),
        ("{backend: vllm, modelName: m}", "vllm"),
        ("{local: {path: d}}", "local"),
        ("{modelName: m, local: {path: d}}", "local"),
        ("{estimate: {}}", "estimate"),
    ],
)
def test_the_token_backend_follows_from_what_is_given(text: str, kind: str) -> None:
    assert made(TokenProducer, text).parameters.kind == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{udsTokenizerConfig: {socketFile: x}}", "the tokenizer sidecar is not supported"),
        ("{backend: local}", "needs local"),
        ("{backend: estimate, local: {path: d}}", "backend is 'estimate' but 'local' is configured"),
        ("{backend: vllm}", "needs modelName"),
    ],
)
def test_token_backends_that_contradict_each_other_are_refused(text: str, message: str) -> None:
    assert message in refused(TokenProducer, text)


def test_the_longest_prefix_is_given_in_tokens_or_blocks_or_not_at_all() -> None:
    assert made(ApproxPrefixCacheProducer, "{}").max_tokens == 131072
    assert made(ApproxPrefixCacheProducer, "{maxPrefixTokensToMatch: 0, blockSize: 32}").max_tokens == 2048 * 32
    assert made(ApproxPrefixCacheProducer, "{maxPrefixTokensToMatch: 0, maxPrefixBlocksToMatch: 0}").max_tokens is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{windowDurationMs: 0}", "expected int >= 1"),
        ("{windowDurationMs: 10001}", "expected int <= 10000"),
        ("{maxPerReplica: 0}", "maxPerReplica must be -1"),
        ("{maxPerReplica: -2}", "expected int >= -1"),
        ("{maxBatchSize: 0}", "maxBatchSize must be -1"),
        ("{maxPrefixTokensToMatch: 63}", "less than one block of 64 tokens"),
        ("{minColocateBlocks: -1}", "expected int >= 0"),
        ("{balanceBy: blocks}", "expected one of 'requests', 'tokens'"),
    ],
)
def test_a_window_that_could_not_work_is_refused(text: str, message: str) -> None:
    assert message in refused(BurstPrefixCacheProducer, text)


def test_a_burst_producers_parameters_become_rules() -> None:
    plain = made(BurstPrefixCacheProducer, "{}")
    assert (plain.rules, plain.window_s, plain.most, plain.max_blocks) == (Rules(block_tokens=64), 0.1, 1000, None)
    given = made(
        BurstPrefixCacheProducer,
        "{windowDurationMs: 250, maxPerReplica: 3, blockSizeTokens: 32, maxPrefixTokensToMatch: 100, minColocateBlocks: 2, "
        "maxBatchSize: -1, balanceBy: tokens}",
    )
    assert given.rules == Rules(block_tokens=32, max_per_replica=3, min_colocate_blocks=2, by_tokens=True)
    assert (given.window_s, given.most, given.max_blocks) == (0.25, None, 3)
