"""What a caller may rely on, over both joins."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from joined import Joined

from specla.client import Delta, GenerateResult, Local, Started
from specla.client.tokenizer import Tokenizer
from specla.drafter_service.config import DrafterConfig
from specla.rpc.errors import DeadlineError, InvalidRequestError, PromptTooLongError

PROMPT = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n\n"
LENGTH = 48
Plain = dict[float, GenerateResult]
DRAFTERS = ["none", "lookup", "suffix", "random"]


@pytest.fixture(scope="session")
def plain(one_process: Joined) -> Plain:
    """The truth: plain decoding in one process, by temperature."""
    return {
        temperature: one_process.client.generate(
            PROMPT, drafter="none", temperature=temperature, seed=7, max_tokens=LENGTH, ignore_eos=True
        )
        for temperature in (0.0, 0.7, 1.0)
    }


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_has_one_text(joined: Joined, plain: Plain, drafter: str, temperature: float) -> None:
    result = joined.client.generate(
        PROMPT, drafter=drafter, temperature=temperature, seed=7, max_tokens=LENGTH, ignore_eos=True
    )
    want = plain[temperature]
    assert (result.token_ids, result.text, result.numerics_id) == (want.token_ids, want.text, want.numerics_id)
    usage = result.usage
    assert (usage.completion_tokens, result.finish_reason) == (LENGTH, "length")
    assert usage.accepted_tokens == sum(result.drafted) <= usage.drafted_tokens
    assert usage.target_passes >= LENGTH - usage.accepted_tokens - 1
    if drafter == "none":
        assert (usage.drafted_tokens, usage.target_passes) == (0, LENGTH)


def test_another_seed_has_another_text(joined: Joined, plain: Plain) -> None:
    result = joined.client.generate(PROMPT, temperature=1.0, seed=8, max_tokens=LENGTH, ignore_eos=True)
    assert result.token_ids != plain[1.0].token_ids


def test_what_repeats_itself_is_drafted(joined: Joined) -> None:
    """A bias drives the target into a loop."""
    options = {"logit_bias": {40: 50.0, 41: 50.0}, "temperature": 0.0, "max_tokens": 1000, "ignore_eos": True}
    alone = joined.client.generate(PROMPT, drafter="none", **options)
    result = joined.client.generate(PROMPT, drafter="suffix", **options)
    assert result.token_ids == alone.token_ids
    assert result.usage.accepted_tokens > 500
    assert result.usage.target_passes == alone.usage.target_passes - result.usage.accepted_tokens


def test_the_text_is_that_of_the_tokens(joined: Joined, tiny_target: Path) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    events = list(joined.client.stream(PROMPT, temperature=1.0, seed=3, max_tokens=200, ignore_eos=True))
    deltas = [event for event in events if isinstance(event, Delta)]
    ids = [token for delta in deltas for token in delta.token_ids]
    assert "".join(delta.text for delta in deltas) == b"".join(tokenizer.pieces[i] for i in ids).decode(
        errors="replace"
    )
    assert [delta.offset for delta in deltas] == [sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))]


def test_characters_of_several_tokens_come_whole(joined: Joined, tiny_target: Path) -> None:
    """A falling bias and a penalty on what was written make the target write an emoji byte by byte."""
    pieces = Tokenizer.load(tiny_target).pieces
    emoji = "🦊"
    ids = [pieces.index(bytes([byte])) for byte in emoji.encode()]
    bias = {token: 4000.0 - 500.0 * i for i, token in enumerate(ids)}
    options = {"logit_bias": bias, "repetition_penalty": 1000.0, "temperature": 0.0, "ignore_eos": True}
    seen = []
    for event in joined.client.stream(PROMPT, max_tokens=4, **options):
        if isinstance(event, Delta):
            seen += [(token, "") for token in event.token_ids[:-1]] + [(event.token_ids[-1], event.text)]
    assert [token for token, _ in seen] == ids
    assert [text for _, text in seen] == ["", "", "", emoji]
    rest = joined.client.generate(PROMPT, max_tokens=4, resumed_ids=ids[:2], **options)
    assert (list(rest.token_ids), rest.text) == (ids[2:], emoji)
    cut = joined.client.generate(PROMPT, max_tokens=3, **options)
    assert (cut.text, cut.finish_reason) == ("\N{REPLACEMENT CHARACTER}", "length")
    stopped = joined.client.generate(PROMPT, max_tokens=40, stop=[emoji], **options)
    assert (stopped.text, list(stopped.token_ids), stopped.matched_stop) == ("", ids, emoji)


def test_a_stop_string_ends_the_text_before_it(joined: Joined, plain: Plain) -> None:
    whole = plain[0.7]
    stop = next(whole.text[i : i + 3] for i in range(20, 60) if whole.text[i : i + 3].isascii())
    result = joined.client.generate(
        PROMPT, temperature=0.7, seed=7, max_tokens=LENGTH, stop=["never there", stop], ignore_eos=True
    )
    assert result.text == whole.text[: whole.text.index(stop)]
    assert (result.finish_reason, result.matched_stop) == ("stop_string", stop)
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert result.usage.completion_tokens == len(result.token_ids) == len(result.drafted)
    joined.wait_until_empty()


def test_a_stop_id_ends_the_text_with_it(joined: Joined, plain: Plain) -> None:
    whole = plain[0.7].token_ids
    last = whole[25]
    result = joined.client.generate(
        PROMPT, temperature=0.7, seed=7, max_tokens=LENGTH, stop_ids=[last], ignore_eos=True
    )
    assert result.token_ids == whole[: whole.index(last) + 1]
    assert (result.finish_reason, result.matched_stop_id) == ("stop_id", last)


def test_a_text_goes_on_behind_resumed_tokens(joined: Joined, plain: Plain) -> None:
    whole = plain[1.0]
    for cut in (1, 17, LENGTH - 1):
        rest = joined.client.generate(
            PROMPT,
            temperature=1.0,
            seed=7,
            max_tokens=LENGTH,
            ignore_eos=True,
            resumed_ids=whole.token_ids[:cut],
            numerics_id=whole.numerics_id,
        )
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.usage.completion_tokens == LENGTH


def test_logprobs_are_the_same_with_and_without_drafts(joined: Joined) -> None:
    options = {"temperature": 0.7, "seed": 5, "max_tokens": 20, "top_logprobs": 3, "ignore_eos": True}
    alone = joined.client.generate(PROMPT, drafter="none", **options)
    drafted = joined.client.generate(PROMPT, drafter="random", **options)
    assert drafted.logprobs == alone.logprobs
    assert len(alone.logprobs) == 20
    for entry in alone.logprobs:
        assert entry.chosen <= entry.top[0][1] <= 0
        assert len(entry.top) == 3


def test_many_at_once_are_each_as_alone(joined: Joined, plain: Plain) -> None:
    def one(i: int) -> bool:
        temperature = (0.0, 0.7, 1.0)[i % 3]
        result = joined.client.generate(
            PROMPT, drafter=DRAFTERS[i % 4], temperature=temperature, seed=7, max_tokens=LENGTH, ignore_eos=True
        )
        return result.token_ids == plain[temperature].token_ids

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(16)))


BROKEN = [
    ({"prompt": ""}, InvalidRequestError, "prompt"),
    ({"prompt": [1, 100_000]}, InvalidRequestError, "prompt.token_ids"),
    ({"prompt": [1] * 5000}, PromptTooLongError, "prompt"),
    ({"temperature": math.nan}, InvalidRequestError, "sampling.temperature"),
    ({"top_p": 0.0}, InvalidRequestError, "sampling.top_p"),
    ({"max_tokens": -1}, InvalidRequestError, "stopping.max_tokens"),
    ({"drafter": "nobody"}, InvalidRequestError, "drafters"),
    ({"drafter": ["random", "random"]}, InvalidRequestError, "drafters"),
    ({"stop": [""]}, InvalidRequestError, "stopping.stop"),
    ({"logit_bias": {5: math.inf}}, InvalidRequestError, "sampling.logit_bias"),
]


def test_broken_input_is_named_and_harms_nobody(joined: Joined, plain: Plain) -> None:
    other: list[GenerateResult] = []

    def run_other() -> None:
        other.append(joined.client.generate(PROMPT, temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True))

    thread = threading.Thread(target=run_other)
    thread.start()
    for options, kind, field in BROKEN:
        options = {"prompt": PROMPT, "max_tokens": 4} | options
        with pytest.raises(kind) as caught:
            joined.client.generate(options.pop("prompt"), **options)
        assert type(caught.value) is kind
        assert caught.value.field == field
        assert caught.value.hint
    thread.join()
    assert other[0].token_ids == plain[1.0].token_ids
    joined.wait_until_empty()


def test_a_message_beyond_grpcs_own_limit_is_refused_by_us(joined: Joined) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        joined.client.generate("word " * 1_500_000)
    assert caught.value.metadata == {"max_prompt_tokens": "4096"}


def test_a_long_prompt_is_run(joined: Joined) -> None:
    ids = [1 + i * 7 % 300 for i in range(4000)]
    result = joined.client.generate(ids, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert (result.usage.prompt_tokens, len(result.token_ids)) == (4000, 4)


def test_closing_the_stream_frees_the_session(joined: Joined) -> None:
    events = joined.client.stream(PROMPT, max_tokens=4000, ignore_eos=True, drafter="random")
    for event in events:
        if isinstance(event, Delta):
            break
    assert len(joined.sessions()) == 1
    events.close()
    joined.wait_until_empty()


def test_a_deadline_ends_the_session_too(joined: Joined) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        joined.client.generate(PROMPT, max_tokens=4000, ignore_eos=True, timeout=0.3)
    assert time.monotonic() - begun < 3
    joined.wait_until_empty()


def test_a_slow_reader_stands_at_its_credit_and_holds_nobody_back(one_process: Joined) -> None:
    """In one process, where nothing lies between; sockets take some megabytes first."""
    events = one_process.client.stream([5, 6, 7], max_tokens=3000, ignore_eos=True, drafter="none")
    assert isinstance(next(events), Started)
    until, length, since = time.monotonic() + 60, -1, time.monotonic()
    while time.monotonic() - since < 1.0:  # until it stands for a second
        assert time.monotonic() < until
        now = one_process.sessions()[0].committed_len
        if now != length:
            length, since = now, time.monotonic()
        time.sleep(0.02)
    assert 128 <= length <= 3 + 2 * 256
    other = one_process.client.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert len(other.token_ids) == 8
    assert one_process.sessions()[0].committed_len == length
    events.close()
    one_process.wait_until_empty()


def test_a_slow_reader_over_sockets_holds_nobody_back(processes: Joined) -> None:
    events = processes.client.stream([5, 6, 7], max_tokens=4000, ignore_eos=True, drafter="none")
    assert isinstance(next(events), Started)
    other = processes.client.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert len(other.token_ids) == 8
    events.close()
    processes.wait_until_empty()


@pytest.mark.parametrize("drafters", [["lookup", "lookup"], ["suffix", DrafterConfig(name="suffix", max_nodes=2)]])
def test_local_refuses_two_drafters_that_no_request_could_tell_apart(drafters: list[str | DrafterConfig]) -> None:
    with pytest.raises(InvalidRequestError, match="twice") as refused:
        Local("/nonexistent", drafters=drafters)
    assert refused.value.field == "drafters"
