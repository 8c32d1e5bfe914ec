"""Token ids to text, token by token, without ever splitting a character."""

import codecs
from collections.abc import Sequence


class Detokenizer:
    """The text of a growing list of tokens; each token costs its own length, however long the text.

    Bytes of a character that is not whole yet are held back, nothing else. All the text given out, joined,
    is the bytes of all tokens decoded as UTF-8, malformed bytes as U+FFFD.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces`: the bytes of each id, as `Tokenizer.pieces`; an id beyond them stands for none."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that this token completes; empty while it leaves a character unfinished."""
        if token >= len(self._pieces):
            return ""  # rows that pad a model's vocabulary have no text
        return self._decoder.decode(self._pieces[token])

    def feed_all(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, one after the other."""
        pieces, known = self._pieces, len(self._pieces)
        return self._decoder.decode(b"".join([pieces[token] for token in tokens if token < known]))

    def flush(self) -> str:
        """The end: what is still held, as U+FFFD, since the rest of the character will not come."""
        return self._decoder.decode(b"", final=True)
