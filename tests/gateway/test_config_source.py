import pytest

from gateway.config_source import ConfigError, Problem, did_you_mean, read, read_file, render


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, "a.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_broken_yaml_names_the_line() -> None:
    assert problems_of("a: 1\nb: [1,\nc: 2\n")[0].startswith("a.yaml:4: not YAML: ")


def test_a_key_written_twice_is_an_error_and_names_both_lines() -> None:
    assert problems_of("a:\n  b: 1\n  c: 2\n  b: 3\n") == ["a.yaml:4: a.b: written twice, first on line 2"]


def test_all_duplicate_keys_are_reported_not_only_the_first() -> None:
    assert len(problems_of("a: 1\na: 2\nb: 1\nb: 2\n")) == 2


def test_several_documents_in_one_file_are_refused() -> None:
    assert "not YAML: a second document begins here" in problems_of("a: 1\n---\na: 2\n")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n- b: 1\n  - c: 2\n", "3: not YAML: '-' does not fit here, in the block that begins on line 2: indent it"),
        ("a:\n  b: 1\n c: 2\n", "3: not YAML: a key does not fit here, in the block that begins on line 1: indent it"),
        ("a: 1\n  b: 2\n", "2: not YAML: no key may stand here: indent the line"),
        ("a:\n\tb: 2\n", "2: not YAML: a tab; indent with spaces"),
        ("a: 1\nb\nc: 2\n", "3: not YAML: a key that begins on line 2 has no ':' behind it"),
    ],
)
def test_wrong_indentation_is_told_with_its_line_and_what_would_be_right(text: str, message: str) -> None:
    assert problems_of(text)[0].startswith(f"a.yaml:{message}")


def test_tags_that_construct_objects_are_refused() -> None:
    assert "plain value" in problems_of("a: !!python/name:os.system x\n")[0]


def test_an_alias_that_contains_itself_is_refused() -> None:
    assert "refers to itself" in problems_of("a: &a [*a]\n")[0]


def test_nested_aliases_cannot_expand_without_limit() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "expands to more than" in problems_of("\n".join(lines))[0]


def test_a_document_nested_without_end_is_refused() -> None:
    assert problems_of("[" * 600) == ["a.yaml: nested too deeply"]


def test_a_missing_file_and_a_binary_file_are_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read"):
        read_file(tmp_path / "nowhere.yaml")
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8: byte 3"):
        read_file(tmp_path / "b.yaml")


def test_scalars_follow_the_core_schema() -> None:
    text = "[on, yes, 2026-01-01, 1:30, 1e8, 0x10, 010, true, Null, ~, '', .5, -7, .inf, 1.]"
    values = read(text, "a.yaml").value
    assert values == [
        *("on", "yes", "2026-01-01", "1:30"),
        *(1e8, 16, 10, True, None, None, "", 0.5, -7, float("inf"), 1.0),
    ]


def test_json_is_accepted() -> None:
    assert read('{"a": [1, "b", null]}', "a.json").value == {"a": [1, "b", None]}


def test_a_problem_points_at_the_line_of_its_path_or_of_the_nearest_written_parent() -> None:
    source = read("a:\n- b: 1\n- c:\n    d: 2\n", "a.yaml")
    assert str(source.problem(("a", 1, "c", "d"), "wrong")) == "a.yaml:4: a[1].c.d: wrong"
    assert str(source.problem(("a", 1, "missing"), "wrong")) == "a.yaml:3: a[1].missing: wrong"


def test_paths_with_odd_keys_stay_readable() -> None:
    assert render(("warmroute", "models", "Qwen/Qwen3-8B", 0)) == "warmroute.models['Qwen/Qwen3-8B'][0]"


def test_the_nearest_name_is_suggested_whatever_its_case() -> None:
    assert did_you_mean("Queue-Scorrer", ["queue-scorer", "kv-scorer"]) == "; did you mean 'queue-scorer'?"
    assert did_you_mean("zzz", ["queue-scorer"]) == ""


def test_a_problem_without_a_place_shows_the_file_alone() -> None:
    assert str(Problem("a.yaml", (), "is empty")) == "a.yaml: is empty"


@pytest.mark.parametrize("text", ["!!int foo", "!!float foo", "!!bool 1", "9" * 5000, "-" + "9" * 5000, "!own:int 5"])
def test_a_scalar_that_is_not_what_it_is_said_to_be_is_a_problem_on_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a.yaml:2: b: .*(cannot be read as|is not known)"):
        read(f"a: 1\nb: {text}\n", "a.yaml")


def test_merge_keys_fill_in_what_a_mapping_does_not_say() -> None:
    text = "- &a {x: 1, y: 2}\n- &b {<<: *a, y: 3, z: 4}\n- {w: 5, <<: [*b, {x: 6, v: 7}]}\n- {'<<': 1}\n"
    source = read(text, "a.yaml")
    assert source.value[1:] == [
        {"y": 3, "z": 4, "x": 1},
        {"w": 5, "y": 3, "z": 4, "x": 1, "v": 7},
        {"<<": 1},
    ]


@pytest.mark.parametrize("text", ["a: {<<: 1}", "a: {<<: [1]}", "a: &a {<<: *a}", "a: &a {<<: [*a]}"])
def test_what_cannot_be_merged_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be followed by a mapping|refers to itself"):
        read(text, "a.yaml")


def test_merges_that_double_end() -> None:
    lines = ["- &m0 {x: 1}", *(f"- &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, 40))]
    with pytest.raises(ConfigError, match="expands to more than"):
        read("\n".join(lines), "a.yaml")
