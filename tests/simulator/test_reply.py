from simulator.reply import ReplyWriter
from simulator.stop_strings import StopStrings
from tokenization.local import LocalTokenizer


def test_a_reply_depends_on_the_prompt_only(writer: ReplyWriter) -> None:
    assert writer.write([1, 2, 3], 30) == writer.write([1, 2, 3], 30)
    assert writer.write([1, 2, 3], 30) != writer.write([1, 2, 4], 30)


def test_a_reply_encodes_back_to_the_sampled_tokens(writer: ReplyWriter, tokenizer: LocalTokenizer) -> None:
    for seed in range(50):
        reply = writer.write([seed], 100, ignore_end=True)
        assert list(tokenizer.encode("".join(reply.texts))) == list(reply.tokens)
        assert reply.texts == tuple(tokenizer.decode([token]) for token in reply.tokens)


def test_a_reply_ends_by_itself_with_the_stop_token_or_at_the_limit(writer: ReplyWriter) -> None:
    natural, cut = writer.write([1], 1000), writer.write([1], 5)
    assert (natural.finish, natural.texts[-1]) == ("stop", "")
    assert 20 <= len(natural.tokens) - 1 <= 60
    assert (cut.finish, len(cut.tokens)) == ("length", 5)


def test_a_reply_that_may_not_end_has_exactly_the_asked_length(writer: ReplyWriter) -> None:
    reply = writer.write([1], 500, ignore_end=True)
    assert (reply.finish, len(reply.tokens)) == ("length", 500)


def test_in_a_second_turn_the_prompt_extends_everything_the_engine_holds(
    writer: ReplyWriter, tokenizer: LocalTokenizer
) -> None:
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    first = list(tokenizer.tokenize("/v1/chat/completions", {"messages": messages}).token_ids)
    reply = writer.write(first, 1000)
    messages += [{"role": "assistant", "content": "".join(reply.texts)}, {"role": "user", "content": "And then?"}]
    second = list(tokenizer.tokenize("/v1/chat/completions", {"messages": messages}).token_ids)
    assert second[: len(first) + len(reply.tokens)] == first + list(reply.tokens)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END"])
    assert [stops.feed(text) for text in ("abc", "E", "Nope", "xEN", "D tail")] == ["a", "b", "cENo", "pex", ""]
    assert stops.found == "END"
    assert stops.rest() == ""


def test_the_earliest_of_several_stop_strings_wins_and_is_cut_off() -> None:
    stops = StopStrings(["zz", " b"])
    assert stops.feed("a b zz") == "a"
    assert stops.found == " b"


def test_without_stop_strings_nothing_is_held_back() -> None:
    stops = StopStrings([])
    assert stops.feed("all") == "all"
    assert stops.rest() == ""
