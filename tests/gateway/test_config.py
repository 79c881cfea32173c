from pathlib import Path

import pytest

from fleet.fleet import Fleet
from fleet.plugin import registered
from gateway.config import LoadedConfig, load, load_text, validate
from gateway.config_source import ConfigError
from gateway.plugin_modules import load_plugin_modules
from gateway.producers_config import PrecisePrefixCacheProducer
from gateway.profile_handlers import DisaggProfileHandler, SingleProfileHandler, StagedHandler
from gateway.unsupported import UNSUPPORTED
from scorers.precise_prefix_cache_scorer import PrecisePrefixCacheScorer

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
ONE_ENDPOINT = """\
- type: static-discovery
  parameters: {endpoints: [{name: a, address: 127.0.0.1, port: 8000}]}
"""
DISCOVERY = "dataLayer: {discovery: {pluginRef: static-discovery}}\n"


def loaded(text: str, discovery: bool = True) -> LoadedConfig:
    """The configuration in `text`, which begins inside the list of plugins."""
    body = f"{HEAD}plugins:\n{ONE_ENDPOINT}{text}{DISCOVERY}" if discovery else f"{HEAD}plugins:\n{text}"
    return load_text(body, "c.yaml")


def problems(text: str, head: str = HEAD) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(head + text, "c.yaml")
    return [str(problem) for problem in caught.value.problems]


def warnings(config: LoadedConfig) -> list[str]:
    return [str(warning) for warning in config.warnings]


# References, types, names


def test_a_misspelled_reference_names_file_line_path_and_the_nearest_name() -> None:
    text = "plugins:\n- type: queue-scorer\nschedulingProfiles:\n- name: a\n  plugins:\n  - pluginRef: queue-scorrer\n"
    assert problems(text) == [
        "c.yaml:8: schedulingProfiles[0].plugins[0].pluginRef: no plugin named 'queue-scorrer'; "
        "did you mean 'queue-scorer'?"
    ]


def test_all_problems_are_reported_in_the_order_of_their_lines() -> None:
    found = problems(
        "featureGates: [flowcontrol]\nplugins:\n- type: queue-scorer\n  parameters: {threshold: 3}\n- type: kv-scorer\n"
        "- name: x\n- type: ''\nschedulingProfiles:\n- name: a\n  plugins: [{pluginRef: nobody}]\n  pluginz: []\n"
        "warmroute: {grpcPort: 0}\n",
    )
    assert [text.split(": ")[0] for text in found] == ["c.yaml:3", "c.yaml:6", "c.yaml:7", "c.yaml:8", "c.yaml:9", "c.yaml:12",
                                                       "c.yaml:13", "c.yaml:14"]  # fmt: skip


def test_a_reference_to_a_plugin_that_was_reported_itself_is_no_second_problem() -> None:
    found = problems(
        "plugins:\n- type: queue-scorrer\nschedulingProfiles:\n- name: a\n  plugins: [{pluginRef: queue-scorrer}]\n"
    )
    assert len(found) == 1


@pytest.mark.parametrize(
    ("misspelt", "meant", "text"),
    [
        ("queue-scorrer", "queue-scorer", "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n"),
        ("disagg-profile-handlr", "disagg-profile-handler", "schedulingProfiles: [{name: decode}, {name: prefill}]\n"),
        ("static-discvery", "static-discovery", DISCOVERY),
        ("openai-parsr", "openai-parser", "requestHandler: {parsers: [{pluginRef: openai-parser}]}\n"),
        ("approx-prefix-cache-producr", "approx-prefix-cache-producer", ""),
        ("expected-work-scorrer", "expected-work-scorer", "- type: expected-work-queue\n"),
        ("prefix-based-pd-decidr", "prefix-based-pd-decider",
         "- type: disagg-profile-handler\n  parameters: {deciders: {prefill: prefix-based-pd-decider}}\n"
         "schedulingProfiles: [{name: decode}, {name: prefill}]\n"),
        ("precise-prefix-cache-producr", "precise-prefix-cache-producer",
         "- type: prefix-cache-scorer\n"
         "  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}\n"),
    ],
)  # fmt: skip
def test_a_misspelt_type_is_the_only_problem_whoever_refers_to_it(misspelt: str, meant: str, text: str) -> None:
    assert problems(f"plugins:\n- type: {misspelt}\n{text}") == [
        f"c.yaml:4: plugins[0].type: no plugin type {misspelt!r}; did you mean {meant!r}?"
    ]


def test_what_a_misspelt_type_leaves_unused_or_undiscovered_is_no_warning() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(f"{HEAD}plugins:\n- type: static-discvery\n- type: queue-scorer\nschedulingProfiles: [{{name: a}}]\n")
    assert caught.value.warnings == []


def test_a_misspelt_type_is_never_suggested_but_its_name_is() -> None:
    found = problems(
        "plugins:\n- {name: mine, type: queue-scorrer}\n- {type: kv-cache-utilization-scorrer}\nschedulingProfiles:\n"
        "- {name: a, plugins: [{pluginRef: mines}, {pluginRef: kv-cache-utilization-scorerr}]}\n"
    )
    assert [text.partition("; ")[2] for text in found] == [
        "did you mean 'queue-scorer'?",
        "did you mean 'kv-cache-utilization-scorer'?",
        "did you mean 'mine'?",
        "did you mean 'kv-cache-utilization-scorer'?",
    ]


def test_a_type_that_is_also_spelt_right_is_checked_as_ever() -> None:
    found = problems(
        "plugins: [{type: queue-scorrer}, {type: queue-scorer}]\nrequestHandler: {parsers: [{pluginRef: queue-scorer}]}\n"
    )
    assert len(found) == 2
    assert "'queue-scorer' is of type 'queue-scorer', which is not a parser" in found[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugins:\n- type: nonsense\n", "plugins[0].type: no plugin type 'nonsense'"),
        ("plugins:\n- {type: queue-scorer}\n- {type: queue-scorer}\n", "the name 'queue-scorer' is taken by plugins[0]"),
        ("plugins: []\nschedulingProfiles: [{name: ''}]\n", "schedulingProfiles[0].name: must not be empty"),
        ("plugins: [{type: header-profile-handler, parameters: {defaultProfile: a}}]\n"
         "schedulingProfiles: [{name: a}, {name: a}]\n", "there is already a profile 'a'"),
        ("plugins: [{type: max-score-picker}, {type: random-picker}]\nschedulingProfiles:\n"
         "- {name: a, plugins: [{pluginRef: max-score-picker}, {pluginRef: random-picker}]}\n", "a second picker"),
        ("plugins: [{type: single-profile-handler}, {type: header-profile-handler}]\n", "a second profile handler"),
        ("plugins: []\nschedulingProfiles: [{name: a}, {name: b}]\n", "2 profiles (a, b) need a profile handler"),
        ("plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: a}, {name: b}]\n", "exactly one profile"),
        ("plugins: [{type: openai-parser}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: openai-parser}]}]\n",
         "which is not a filter, scorer or picker"),
        ("plugins: [{type: queue-scorer}]\nrequestHandler: {parsers: [{pluginRef: queue-scorer}]}\n", "which is not a parser"),
        ("plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: queue-scorer}]}\n", "which is not a data source"),
        ("plugins: [{type: queue-scorer}]\ndataLayer: {discovery: {pluginRef: queue-scorer}}\n", "which is not a discovery"),
        ("plugins: [{type: queue-scorer}]\nsaturationDetector: {pluginRef: queue-scorer}\n", "not a saturation detector"),
        ("plugins:\n- type: queue-scorer\n- type: prefix-cache-scorer\n"
         "  parameters: {prefixMatchInfoProducerName: queue-scorer}\n",
         "which is not a producer"),
        ("plugins: [{type: queue-scorer}]\nschedulingProfiles:\n"
         "- {name: a, plugins: [{pluginRef: queue-scorer, weight: .inf}]}\n",
         "expected a finite number"),
        ("plugins: []\ndataLayer: {peerDiscovery: {pluginRef: x}}\n", "routers share nothing yet"),
        ("plugins: []\nwarmroute: {handoff: {timeout: 0s}}\n", "handoff.timeout: expected float > 0.0"),
        ("plugins:\n- {type: always-disagg-pd-decider}\n- type: disagg-profile-handler\n"
         "  parameters: {profiles: {decode: x, prefill: x}, deciders: {prefill: always-disagg-pd-decider}}\n"
         "schedulingProfiles: [{name: x}]\n", "the decode and the prefill stage both run 'x'"),
        ("plugins:\n- {type: always-disagg-pd-decider}\n- type: disagg-profile-handler\n"
         "  parameters: {profiles: {decode: prefill}, deciders: {prefill: always-disagg-pd-decider}}\n"
         "schedulingProfiles: [{name: prefill}]\n", "the decode and the prefill stage both run 'prefill'"),
        ("plugins:\n- {type: always-disagg-pd-decider}\n- type: disagg-profile-handler\n"
         "  parameters: {profiles: {encode: x, prefill: x}, deciders: {prefill: always-disagg-pd-decider}}\n"
         "schedulingProfiles: [{name: x}, {name: decode}]\n", "the prefill and the encode stage both run 'x'"),
        ("plugins: [{type: token-producer}, "
         "{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: token-producer}}]\n",
         "'token-producer' is of type 'token-producer', which finds no matches"),
        ("plugins: []\nwarmroute: {decideTimeout: 0s}\n", "decideTimeout: expected float > 0.0"),
        ("plugins: [{type: token-producer, parameters: {local: {path: nowhere}}}]\n", "no directory nowhere"),
        ("plugins: [{type: token-producer, parameters: {modelName: m, vllm: {}, estimate: {}}}]\n", "more than one backend"),
        ("plugins: [{type: token-producer, parameters: {vllm: {}}}]\n", "the vllm backend needs modelName"),
        ("plugins:\n- type: precise-prefix-cache-producer\n"
         "  parameters: {indexerConfig: {kvBlockIndexConfig: {redisConfig: {}}}}\n",
         "a shared index in Redis is not supported"),
        ("plugins:\n- type: core-metrics-extractor\n  parameters: {engineConfigs: [{name: x, kvUsageSpec: 'a{b'}]}\n",
         "engineConfigs[0]: expected a metric such as"),
        ("plugins: []\nwarmroute: {models: {a: {aliases: [b]}, b: {}}}\n", "'b' is already a model's name"),
        ("plugins: []\nfeatureGates: [flowControl]\n", "flow control is not supported"),
        ("plugins: []\nfeatureGates: ['flowControl=maybe']\n", "expected 'flowControl=true' or 'flowControl=false'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    assert any(message in problem for problem in problems(text)), problems(text)


def test_a_decider_that_does_not_exist_is_reported_where_it_is_named() -> None:
    text = (
        "plugins:\n- type: disagg-profile-handler\n  parameters:\n    deciders:\n      prefill: prefix-based-pd-decidr\n"
        "- type: prefix-based-pd-decider\nschedulingProfiles:\n- name: decode\n- name: prefill\n"
    )
    assert problems(text) == [
        "c.yaml:7: plugins[0].parameters.deciders.prefill: no plugin named 'prefix-based-pd-decidr'; "
        "did you mean 'prefix-based-pd-decider'?"
    ]


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "text"):
        assert "expected a mapping that begins with 'apiVersion" in problems(text, head="")[0]
    assert "'plugins' is missing" in problems("")[0]
    assert (
        "expected 'llm-d.ai/v1alpha1', got 'v1'"
        in problems("plugins: []\n", "apiVersion: v1\nkind: EndpointPickerConfig\n")[0]
    )
    assert (
        "expected 'EndpointPickerConfig', got 'Pod'"
        in problems("plugins: []\n", "apiVersion: llm-d.ai/v1alpha1\nkind: Pod\n")[0]
    )
    found, warned = validate(tmp_path / "nowhere.yaml")
    assert "cannot be read" in str(found[0])
    assert warned == []


def test_no_supported_type_is_also_called_unsupported() -> None:
    load_plugin_modules()
    assert not set(registered()) & set(UNSUPPORTED)


# Warnings


def test_the_old_api_version_old_names_and_old_places_work_with_a_warning() -> None:
    config = load_text(
        "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: tokenizer\n"
        "  name: token-producer\n- type: by-label-selector\n- type: utilization-detector\n- type: openai-parser\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: by-label-selector}]}]\n"
        "saturationDetector: {pluginRef: utilization-detector}\nparser: {pluginRef: openai-parser}\n",
        "c.yaml",
    )
    text = "\n".join(warnings(config))
    assert "apiVersion: inference.networking.x-k8s.io/v1alpha1 is deprecated" in text
    assert "'tokenizer' is the old name of 'token-producer'" in text
    assert "'by-label-selector' is deprecated" in text
    assert "saturationDetector: deprecated: use flowControl.saturationDetector" in text
    assert "parser: deprecated: use requestHandler.parsers" in text
    assert [parser.type for parser in config.parsers] == ["openai-parser"]


@pytest.mark.parametrize(
    ("parameters", "place", "newer"),
    [
        ("decodeProfile: decode", "decodeProfile", "profiles.decode"),
        ("DeciderPluginName: always-disagg-pd-decider", "deciderPluginName", "deciders.prefill"),
    ],
)
def test_older_parameters_of_a_handler_work_and_say_what_to_write(parameters: str, place: str, newer: str) -> None:
    config = loaded(
        f"- {{type: disagg-profile-handler, parameters: {{{parameters}}}}}\n- type: always-disagg-pd-decider\n"
        "schedulingProfiles: [{name: decode, plugins: []}, {name: prefill, plugins: []}]\n"
    )
    assert f"c.yaml:6: plugins[1].parameters.{place}: the older spelling of {newer}; use that" in warnings(config)


def test_older_parameters_are_found_inside_others_too() -> None:
    config = loaded(
        "- type: precise-prefix-cache-producer\n  parameters:\n    tokenProcessorConfig:\n      blockSize: 64\n"
        "- {type: approx-prefix-cache-producer, parameters: {blockSize: 32}}\n"
    )
    text = "\n".join(warnings(config))
    assert (
        "c.yaml:9: plugins[1].parameters.tokenProcessorConfig.blockSize: the older spelling of blockSizeTokens" in text
    )
    assert "c.yaml:10: plugins[2].parameters.blockSize: the older spelling of blockSizeTokens; use that" in text


def test_what_has_no_effect_is_said() -> None:
    config = loaded(
        "- type: queue-scorer\n- type: load-aware-scorer\n- type: decode-filter\nschedulingProfiles:\n- name: a\n  plugins:\n"
        "  - {pluginRef: queue-scorer}\n  - {pluginRef: decode-filter, weight: 2}\nflowControl: {maxBytes: 1Gi}\n"
        "featureGates: [haPopulateNonLeaderDatastore=false]\n"
    )
    text = "\n".join(warnings(config))
    assert "schedulingProfiles[0].plugins[1].weight: has no effect: 'decode-filter' is not a scorer" in text
    assert "flowControl: has no effect without the gate flowControl" in text
    assert "plugins[2]: 'load-aware-scorer' is declared and never used" in text
    assert "featureGates[0]: has no effect" in text


def test_a_configuration_without_discovery_says_that_it_has_no_endpoints() -> None:
    config = loaded("- type: queue-scorer\n", discovery=False)
    assert config.discovery is None
    assert "no discovery, so there are no endpoints" in warnings(config)[0]


def test_a_declared_discovery_that_nobody_names_is_used_with_a_warning() -> None:
    config = load_text(f"{HEAD}plugins:\n{ONE_ENDPOINT}", "c.yaml")
    assert config.discovery is config.plugins["static-discovery"]
    assert "no discovery is named: 'static-discovery' is used" in warnings(config)[0]


# What is added, what is bound


def test_without_profiles_and_scorers_expected_work_decides() -> None:
    config = load(None)
    (profile,) = config.profiles
    assert [(scorer.type, weight) for scorer, weight in profile.scorers] == [("expected-work-scorer", 1.0)]
    assert profile.picker.type == "max-score-picker"
    assert isinstance(config.handler, SingleProfileHandler)
    assert config.default_match == "approx-prefix-cache-producer"
    precise = loaded("- type: precise-prefix-cache-producer\n")
    assert precise.default_match == "precise-prefix-cache-producer"


def test_without_profiles_one_is_made_of_everything_in_its_order() -> None:
    (profile,) = loaded("- type: queue-scorer\n- type: decode-filter\n- type: random-picker\n").profiles
    assert [it.type for it in profile.filters] == ["decode-filter"]
    assert [(it.type, weight) for it, weight in profile.scorers] == [("queue-scorer", 1.0)]
    assert profile.picker.type == "random-picker"


def test_a_profile_without_a_picker_gets_a_declared_one() -> None:
    text = "- type: queue-scorer\n- type: random-picker\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n"
    assert loaded(text).profiles[0].picker.type == "random-picker"


def test_a_plugin_of_two_kinds_takes_part_as_both() -> None:
    (profile,) = loaded("- type: context-length-aware\n  parameters: {enableFiltering: true}\n").profiles
    assert [it.type for it in profile.filters] == ["context-length-aware"]
    assert [it.type for it, _ in profile.scorers] == ["context-length-aware"]


def test_parameter_names_may_be_written_in_any_case() -> None:
    config = loaded("- type: load-aware-scorer\n  parameters: {THRESHOLD: 7}\n")
    assert config.plugins["load-aware-scorer"].parameters.threshold == 7  # type: ignore[attr-defined]


def test_a_scorer_that_names_no_producer_is_bound_to_the_precise_one_with_a_warning() -> None:
    config = loaded(
        "- type: precise-prefix-cache-producer\n  name: exact\n- type: prefix-cache-scorer\n- type: queue-scorer\n"
    )
    assert config.default_match == "exact"
    assert "approx-prefix-cache-producer" not in config.plugins
    assert any(
        "plugins[2].parameters.prefixMatchInfoProducerName: not given: 'exact' is used" in text
        for text in warnings(config)
    )


def test_an_approximate_producer_that_was_asked_for_is_used_as_llm_d_does() -> None:
    both = "- type: precise-prefix-cache-producer\n- type: approx-prefix-cache-producer\n- type: prefix-cache-scorer\n"
    config = loaded(both)
    assert config.default_match == "approx-prefix-cache-producer"
    assert any("reads 'approx-prefix-cache-producer', not the precise one" in text for text in warnings(config))


def test_a_named_default_producer_is_created() -> None:
    config = loaded(
        "- type: prefix-cache-scorer\n  parameters: {prefixMatchInfoProducerName: approx-prefix-cache-producer}\n"
        "- type: token-load-scorer\n  parameters: {inFlightLoadProducerName: inflight-load-producer}\n"
    )
    assert {"approx-prefix-cache-producer", "inflight-load-producer"} <= set(config.plugins)


def test_a_token_producer_is_found_under_any_name() -> None:
    config = loaded("- type: token-producer\n  name: tokens\n  parameters: {modelName: m}\n- type: queue-scorer\n")
    assert config.token_producer.name == "tokens"
    assert config.token_producer.parameters.kind == "vllm"


def test_a_precise_producer_without_real_tokens_is_warned_about() -> None:
    config = loaded("- type: precise-prefix-cache-producer\n- type: queue-scorer\n")
    assert any("needs the engine's token ids to match anything" in text for text in warnings(config))


def test_tokenizers_are_found_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "q").mkdir(parents=True)
    (tmp_path / "models" / "q" / "tokenizer.json").write_text("{}")
    (tmp_path / "c.yaml").write_text(
        f"{HEAD}plugins:\n{ONE_ENDPOINT}- type: precise-prefix-cache-producer\n- type: queue-scorer\n{DISCOVERY}"
        "warmroute: {models: {m: {tokenizer: models/q}}}\n"
    )
    config = load(tmp_path / "c.yaml")
    assert config.tokenizer_of("m") == tmp_path / "models" / "q"
    assert config.tokenizer_of("other") is None
    assert config.warnings == []
    (tmp_path / "models" / "q" / "tokenizer.json").unlink()
    assert "holds no tokenizer.json" in str(validate(tmp_path / "c.yaml")[0][0])


def test_endpoint_files_are_found_relative_to_the_configuration(tmp_path: Path) -> None:
    text = f"{HEAD}plugins:\n- type: file-discovery\n  parameters: {{path: e.yaml}}\n"
    config = load_text(text, str(tmp_path / "c.yaml"))
    assert config.discovery is not None
    assert config.discovery.parameters.path == str(tmp_path / "e.yaml")  # type: ignore[attr-defined]


def test_the_older_all_in_one_scorer_gets_a_producer_of_its_parameters() -> None:
    config = loaded("- type: precise-prefix-cache-scorer\n  parameters: {tokenProcessorConfig: {blockSize: 32}}\n")
    scorer, producer = config.plugins["precise-prefix-cache-scorer"], config.precise
    assert isinstance(scorer, PrecisePrefixCacheScorer)
    assert isinstance(producer, PrecisePrefixCacheProducer)
    assert (producer.block_tokens, scorer.producer) == (32, "precise-prefix-cache-producer")
    assert config.profiles[0].scorers[0][0] is scorer
    text = "- type: precise-prefix-cache-producer\n  name: mine\n- type: precise-prefix-cache-scorer\n"
    scorer = loaded(text).plugins["precise-prefix-cache-scorer"]
    assert isinstance(scorer, PrecisePrefixCacheScorer)
    assert scorer.producer == "mine"


def test_metrics_are_scraped_unless_told_otherwise() -> None:
    assert [(source.type, [it.type for it in found]) for source, found in loaded("- type: queue-scorer\n").sources] == [
        ("metrics-data-source", ["core-metrics-extractor"])
    ]
    off = load_text(f"{HEAD}plugins: [{{type: queue-scorer}}]\ndataLayer: {{injectDefaults: false}}\n")
    assert off.sources == []


def test_a_renamed_metrics_source_is_not_added_a_second_time() -> None:
    text = (
        f"{HEAD}plugins: [{{type: metrics-data-source, name: mine}}, {{type: core-metrics-extractor}}]\n"
        "dataLayer: {sources: [{pluginRef: mine, extractors: [{pluginRef: core-metrics-extractor}]}]}\n"
    )
    assert [source.name for source, _ in load_text(text).sources] == ["mine"]


def test_the_parsers_are_the_usual_four_and_an_explicit_list_gains_none() -> None:
    assert [parser.type for parser in loaded("- type: queue-scorer\n").parsers] == [
        "openai-parser",
        "anthropic-parser",
        "vllmhttp-parser",
        "passthrough-parser",
    ]
    one = load_text(
        f"{HEAD}plugins: [{{type: openai-parser}}]\nrequestHandler: {{parsers: [{{pluginRef: openai-parser}}]}}\n"
    )
    assert [parser.type for parser in one.parsers] == ["openai-parser"]


def test_our_section_has_defaults_and_readable_units() -> None:
    assert load(None).settings.grpc_port == 9002
    settings = loaded(
        "- type: queue-scorer\n"
        "warmroute: {maxBodyBytes: 10Mi, drainTimeout: 1m, index: {maxKeys: 5M}, envoy: {failOpen: false}}\n"
    ).settings
    assert (settings.max_body_bytes, settings.drain_timeout, settings.index.max_keys) == (10 * 2**20, 60.0, 5_000_000)
    assert settings.envoy.fail_open is False


# llm-d's samples

REFUSED = {
    "epp-mm-embeddings-cache-config": "mm-embeddings-cache-producer",
    "probabilistic-admitter-epp-config": "probabilistic-admitter",
    "sim-program-aware-config": "program-aware-fairness",
    "soft-reflective-ceiling-epp-config": "soft-reflective-ceiling-policy",
}
SAMPLES = sorted((Path(__file__).parent.parent / "data" / "llmd").glob("*.yaml"))


def test_there_are_nineteen_samples() -> None:
    assert len(SAMPLES) == 19


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_llm_ds_samples_load_or_are_refused_with_what_to_use(sample: Path) -> None:
    found, _ = validate(sample)
    plugin = REFUSED.get(sample.stem)
    if plugin is None:
        assert found == []
    else:
        assert any(f"plugin type '{plugin}' is not supported" in str(it) and "Instead: " in str(it) for it in found)


def test_a_disaggregated_sample_is_wired_as_written() -> None:
    config = load(next(path for path in SAMPLES if path.stem == "pd-epp-config"))
    handler = config.handler
    assert isinstance(handler, DisaggProfileHandler)
    assert isinstance(handler, StagedHandler)
    assert handler.gates["prefill"] is config.plugins["prefix-based-pd-decider"]
    assert [profile.name for profile in config.profiles] == ["prefill", "decode"]


@pytest.mark.parametrize("name", ["quickstart", "prefill-decode"])
def test_our_own_samples_load_without_a_warning(name: str) -> None:
    config = load(Path(__file__).parents[2] / "configs" / f"{name}.yaml")
    assert config.warnings == []
    assert config.discovery is not None
    assert config.tokenizer_of("anything") == Path(__file__).parents[2] / "configs" / "models" / "qwen3"


# The router queue


def test_the_queue_is_on_where_neither_profiles_nor_scorers_are_written() -> None:
    config = loaded("", discovery=True)
    assert config.queue is not None
    queue, scorer = config.queue
    assert (queue.type, scorer.type) == ("expected-work-queue", "expected-work-scorer")
    assert loaded("- type: queue-scorer\n").queue is None
    assert loaded("- type: expected-work-scorer\n").queue is None


def test_naming_the_queue_is_enough_and_its_parameters_are_read() -> None:
    config = loaded(
        "- type: expected-work-scorer\n- type: expected-work-queue\n"
        "  parameters: {order: shortest, maxWait: 1m, openThreshold: 500ms, kvLimit: 0.8, maxRequests: 5}\n"
    )
    queue = config.work_queue(Fleet())
    assert queue is not None
    limits = queue.limits
    assert (limits.order, limits.max_wait_s, limits.open_s, limits.kv_limit, limits.max_requests) == (
        "shortest",
        60,
        0.5,
        0.8,
        5,
    )
    assert not warnings(config)


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ("- type: queue-scorer\n- type: expected-work-queue\n", "'expected-work-queue' needs an expected-work-scorer"),
        ("- type: expected-work-scorer\n- {type: expected-work-scorer, name: b}\n- type: expected-work-queue\n",
         "'expected-work-queue' needs scorerName: one of expected-work-scorer, b"),
        ("- type: expected-work-scorer\n- type: expected-work-queue\n- {type: expected-work-queue, name: b}\n",
         "a second router queue"),
        ("- type: expected-work-scorer\n- {type: expected-work-queue, parameters: {scorerName: expected-work-scorrer}}\n",
         "did you mean 'expected-work-scorer'"),
        ("- type: expected-work-scorer\n- {type: expected-work-queue, parameters: {order: fifo}}\n",
         "expected one of 'backfill', 'shortest', got 'fifo'"),
        ("- type: expected-work-scorer\n- {type: expected-work-queue, parameters: {maxWait: 30}}\n", "expected a duration"),
    ],
)  # fmt: skip
def test_a_queue_that_cannot_work_is_refused(plugins: str, message: str) -> None:
    assert any(message in problem for problem in problems(f"plugins:\n{plugins}")), problems(f"plugins:\n{plugins}")


def test_one_of_several_scorers_prices_for_the_queue() -> None:
    config = loaded(
        "- {type: expected-work-scorer, name: a}\n- {type: expected-work-scorer, name: b}\n"
        "- {type: expected-work-queue, parameters: {scorerName: b}}\n"
    )
    assert config.queue is not None
    assert config.queue[1].name == "b"


def test_a_decision_may_take_as_long_as_a_request_may_wait() -> None:
    waiting = loaded("- type: expected-work-scorer\n- {type: expected-work-queue, parameters: {maxWait: 2m}}\n")
    at_once = loaded("- type: expected-work-scorer\n")
    assert waiting.decision_limit_s == at_once.decision_limit_s + 120


def test_objectives_are_names_with_priorities() -> None:
    config = load_text(f"{HEAD}plugins: []\nwarmroute: {{objectives: {{chat: 10, batch: -1}}}}\n")
    assert config.settings.objectives == {"chat": 10, "batch": -1}


def test_a_tokenizer_may_be_a_model_of_the_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    text = "plugins: [{type: token-producer, parameters: {local: {path: org/name}}}]\n"
    config = load_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n" + text, str(tmp_path / "c.yaml"))
    assert config.token_producer.parameters.local is not None
    assert config.token_producer.parameters.local.path == str(snapshot)


def test_two_servers_cannot_have_one_port() -> None:
    head = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: []\n"
    with pytest.raises(ConfigError, match=r"warmroute\.metricsPort: 9002 is already warmroute\.grpcPort"):
        load_text(head + "warmroute: {metricsPort: 9002}\n")


def test_a_plugin_whose_code_fails_is_a_problem_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("theirs")

    monkeypatch.setattr("scorers.load_aware_scorer.LoadAwareScorer.__init__", broken)
    found = problems("plugins:\n- type: queue-scorer\n- type: load-aware-scorer\n  parameters: {threshold: 3}\n")
    assert len(found) == 1
    assert ":6: plugins[1].parameters: 'load-aware-scorer' cannot be made: KeyError('theirs')" in found[0]


@pytest.mark.parametrize(
    "entry",
    [
        "{type: metrics-data-source, parameters: {interval: ''}}",
        "{type: precise-prefix-cache-producer, parameters: {speculativeTTL: ''}}",
        "{type: precise-prefix-cache-scorer, parameters: {speculativeTTL: ''}}",
    ],
)
def test_an_empty_duration_is_the_default_as_in_llm_d(entry: str) -> None:
    loaded = load_text(f"{HEAD}plugins:\n- {entry}\n")
    assert loaded.precise is None or loaded.precise.parameters.speculative_ttl == 2.0
