"""Text to token ids, and each token's bytes: what the coordinator needs of a model's tokenizer.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from specla.rpc.errors import InvalidRequestError, UnsupportedModelError

_SENTENCE_SPACE = "▁"


class Tokenizer:
    """A tokenizer.json, loaded once.

    Attributes:
        pieces: the bytes each id stands for, by id; special tokens and unused ids stand for none.
        hash: SHA-256 of the file, hexadecimal; the verifier's `tokenizer_hash` of the same model.
    """

    def __init__(self, text: bytes) -> None:
        """Read the contents of a tokenizer.json.

        Raises:
            UnsupportedModelError: it is not a tokenizer, or its decoder is neither byte-level nor
                SentencePiece's.
        """
        try:
            self._fast = FastTokenizer.from_str(text.decode())
        except Exception as error:  # tokenizers raises plain Exception
            raise UnsupportedModelError(
                "the tokenizer file cannot be read", hint="Give a tokenizer.json of the tokenizers library"
            ) from error
        self.pieces = token_pieces(self._fast)
        self.hash = hashlib.sha256(text).hexdigest()
        self._longest = max(map(len, self.pieces), default=1)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read `path`, a tokenizer.json or a folder that holds one.

        Raises:
            InvalidRequestError: there is no such file.
            UnsupportedModelError: see the constructor.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidRequestError(
                "tokenizer", f"there is no {file}", hint="Give the target's folder or its tokenizer.json"
            )
        return cls(file.read_bytes())

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the model's tokenizer adds to every text."""
        ids: list[int] = self._fast.encode(text).ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))`, in no time: lets a caller refuse a book unread."""
        return len(text) // self._longest


def token_pieces(fast: FastTokenizer) -> tuple[bytes, ...]:
    """The bytes of every id.

    Byte-level tokenizers write each byte as one printable character; SentencePiece writes a space as U+2581
    and a byte that has no piece as <0xNN>. A piece of the latter keeps its leading space: a completion
    goes on behind a prompt, it does not begin a text.

    Raises:
        UnsupportedModelError: the decoder is of another kind.
    """
    kinds = _decoder_kinds(json.loads(fast.to_str())["decoder"])
    if "ByteLevel" in kinds:
        to_bytes = _byte_level_piece
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentence_piece
    else:
        raise UnsupportedModelError(
            f"the tokenizer's decoder is {' + '.join(sorted(kinds)) or 'absent'}",
            hint="Supported are byte-level BPE and SentencePiece (Metaspace, ByteFallback)",
        )
    vocabulary = fast.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    added = fast.get_added_tokens_decoder()
    for piece, index in vocabulary.items():
        if index in added:
            pieces[index] = b"" if added[index].special else piece.encode()
        else:
            pieces[index] = to_bytes(piece)
    return tuple(pieces)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoder_kinds(part) for part in decoder["decoders"]))
    return {str(decoder["type"])}


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:  # an entry that byte-level BPE cannot have made: it stands for its own text
        return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SENTENCE_SPACE, " ").encode()
