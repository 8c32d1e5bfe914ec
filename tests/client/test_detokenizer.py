import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_target import make_tiny_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from specla.client.detokenizer import Detokenizer
from specla.client.tokenizer import Tokenizer, token_pieces
from specla.rpc.errors import InvalidRequestError, UnsupportedModelError

FAST = make_tiny_tokenizer()
TINY = Tokenizer(FAST.to_str().encode())


def pieces_of(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TINY.pieces)
    return [detokenizer.feed(token) for token in ids] + [detokenizer.flush()]


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert "".join(pieces_of(TINY.encode(text))) == text


@given(st.lists(st.integers(0, 319), max_size=60))
def test_any_ids_give_what_the_library_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == FAST.decode(ids, skip_special_tokens=True)


@given(st.lists(st.lists(st.integers(0, 330), max_size=8), max_size=12))
def test_tokens_in_runs_give_what_they_give_one_by_one(runs: list[list[int]]) -> None:
    one_by_one, in_runs = Detokenizer(TINY.pieces), Detokenizer(TINY.pieces)
    for run in runs:
        assert in_runs.feed_all(run) == "".join([one_by_one.feed(token) for token in run])
    assert in_runs.flush() == one_by_one.flush()


@given(st.text(min_size=1))
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    """Byte by byte, so that every character of several bytes is split: nothing early, nothing late."""
    detokenizer = Detokenizer([bytes([byte]) for byte in range(256)])
    for character in text:
        shown = [detokenizer.feed(byte) for byte in character.encode()]
        assert shown == [""] * (len(shown) - 1) + [character]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_marked_only_at_the_end() -> None:
    detokenizer = Detokenizer([bytes([byte]) for byte in range(256)])
    assert [detokenizer.feed(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_and_padding_ids_have_no_text() -> None:
    assert pieces_of([0, 10_000]) == ["", "", ""]


def test_sentencepiece_tokens_keep_spaces_and_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "re": 2, "<0xF0>": 3, "<0x9F>": 4, "<0x98>": 5, "<0x80>": 6}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(token_pieces(fast))
    assert [detokenizer.feed(token) for token in (1, 2, 3, 4, 5, 6)] == [" the", "re", "", "", "", "😀"]


def test_other_decoders_are_refused_by_name() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        token_pieces(fast)


def test_files_that_are_no_tokenizer_are_refused(tmp_path) -> None:
    with pytest.raises(InvalidRequestError, match=r"there is no .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        Tokenizer.load(tmp_path)


@given(st.text(max_size=200))
def test_the_lower_bound_of_tokens_holds(text: str) -> None:
    assert TINY.fewest_tokens(text) <= len(TINY.encode(text))


def test_time_is_linear_in_the_text() -> None:
    rng = random.Random(5)

    def seconds(count: int) -> float:
        ids = [rng.randrange(320) for _ in range(count)]
        start = time.perf_counter()
        pieces_of(ids)
        return time.perf_counter() - start

    # Quadratic work would make the ratio 256; the wide margin is for a busy machine.
    assert min(seconds(160_000) for _ in range(3)) < 64 * min(seconds(10_000) for _ in range(3))
