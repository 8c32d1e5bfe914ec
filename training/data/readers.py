"""From a package's members to plain text: one function a format, each `(path, content) -> documents`."""

import gzip
import html
import json
import re
import zlib
from collections.abc import Callable, Iterator

Reader = Callable[[str, bytes], Iterator[str]]

PIECE = 16_000  # characters: a long book becomes pieces of about this size, cut between paragraphs

_DROPPED = re.compile(
    r"<!--.*?-->|<(script|style|head|nav|header|footer|svg|button|form|select)\b.*?</\1\s*>|<!\[CDATA\[|\]\]>",
    re.S | re.I,
)
_FRAMES = re.compile(r'<div class="(?:sphinxsidebar|related|navheader|navfooter|footer|header)"[^>]*>.*?</div>', re.S)
_PRE = re.compile(r"(<(?:pre|programlisting|screen)\b.*?</(?:pre|programlisting|screen)\s*>)", re.S | re.I)
_BLOCK = re.compile(
    r"</?(?:p|div|h[1-6]|ul|ol|dl|dt|table|tr|section|blockquote|title|para|sect\d|listitem|item|page|note|steps)\b[^>]*>",
    re.I,
)
_ANCHORS = re.compile(r"^\.\. (?:toctree|index|currentmodule|module|_|\|).*\n(?:[ \t]+.*\n|\n(?=[ \t]))*", re.M)
_TAG = re.compile(r"<[a-zA-Z/!?][^<>]*>")


def html_text(source: str) -> str:
    """Readable text of HTML, Mallard or DocBook: blocks as paragraphs, preformatted parts as they stand."""
    source = _FRAMES.sub(" ", _DROPPED.sub(" ", source))
    parts = []
    for i, part in enumerate(_PRE.split(source)):
        if i % 2:
            parts.append("\n\n" + html.unescape(_TAG.sub("", part)).strip("\n") + "\n\n")
            continue
        part = re.sub(r"\s+", " ", part)
        part = re.sub(r"<li\b[^>]*>", "\n- ", part, flags=re.I)
        part = re.sub(r"<(?:br|dd)\b[^>]*>", "\n", part, flags=re.I)
        part = re.sub(r"</?t[dh]\b[^>]*>", " ", part, flags=re.I)
        part = html.unescape(_TAG.sub("", _BLOCK.sub("\n\n", part)))
        parts.append(re.sub(r" *\n *", "\n", re.sub(r"[ \t\xa0]+", " ", part)))
    return tidy(re.sub(r"\n- *\n+", "\n- ", "".join(parts).replace("¶", "")))


def tidy(text: str) -> str:
    """Plain quotes and dashes, no trailing blanks, at most one empty line in a row."""
    for fancy, plain in (("\r\n", "\n"), ("\r", "\n"), ("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("\xa0", " ")):
        text = text.replace(fancy, plain)
    text = text.replace("\u2014", " - ").replace("\u2013", "-").replace("\u2026", "...").replace("\u200b", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def unwrap(text: str) -> str:
    """Join the hard-wrapped lines of prose paragraphs; indented and short-lined blocks stay as they are."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        wrapped = len(lines) > 1 and all(len(line) > 45 for line in lines[:-1])
        plain = not any(line.startswith((" ", "\t")) for line in lines)
        blocks.append(" ".join(line.strip() for line in lines) if wrapped and plain else block)
    return "\n\n".join(blocks)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text between paragraphs into pieces of about `size` characters."""
    kept: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        kept.append(paragraph)
        length += len(paragraph)
        if length > size:
            yield "\n\n".join(kept)
            kept, length = [], 0
    if kept:
        yield "\n\n".join(kept)


def _decode(path: str, content: bytes) -> str:
    if path.endswith((".gz", ".dz")):
        content = gzip.decompress(content)
    return content.decode("utf-8", "replace")


def read_text(path: str, content: bytes) -> Iterator[str]:
    """Plain text, perhaps gzipped."""
    yield from pieces(unwrap(tidy(_decode(path, content))))


def read_html(path: str, content: bytes) -> Iterator[str]:
    """HTML, Mallard or DocBook; of a Sphinx page only its body."""
    source = _decode(path, content)
    start = source.find('role="main"')
    if start >= 0:
        source = source[source.find(">", start) + 1 :]
    yield from pieces(html_text(source))


def read_rst(path: str, content: bytes) -> Iterator[str]:
    """reStructuredText: roles reduced to their words, anchors, indexes and tables of contents dropped."""
    text = tidy(_decode(path, content))
    text = re.sub(
        r"^\.\. (?:toctree|index|currentmodule|module|_|\|).*\n(?:[ \t]+.*\n|\n(?=[ \t]))*", "", text, flags=re.M
    )
    text = re.sub(r":[a-z:+-]+:`~?([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_+", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"^:(?!param|return)[a-zA-Z-]+:.*\n", "", text, flags=re.M)
    yield from pieces(tidy(text))


def read_pod(path: str, content: bytes) -> Iterator[str]:
    """Perl's documentation format."""
    text = re.sub(r"^=(?:head\d|item)\s+", "", tidy(_decode(path, content)), flags=re.M)
    text = re.sub(r"^=(?:over|back|cut|pod|encoding|begin|end|for).*\n", "", text, flags=re.M)
    text = re.sub(r"L<(?:[^|>]*\|)?([^>]*)>", r"\1", text)
    text = re.sub(r"[BCFIX]<<+ (.*?) >+>", r"\1", text)
    text = re.sub(r"[BCFIX]<([^<>]*)>", r"\1", text)
    yield from pieces(unwrap(tidy(text.replace("E<gt>", ">").replace("E<lt>", "<"))))


def read_man(path: str, content: bytes) -> Iterator[str]:
    """A manual page's source, its macros reduced to words and breaks."""
    lines = []
    for line in _decode(path, content).split("\n"):
        if line.startswith((".SH", ".SS")):
            lines += ["", line[3:].strip().strip('"'), ""]
        elif line.startswith((".PP", ".TP", ".IP", ".P", ".LP", ".HP")):
            lines.append("")
        elif line.startswith((".B", ".I", ".BR", ".RB", ".IR", ".RI", ".BI", ".IB")):
            words = line.split(None, 1)
            alternating = len(words[0]) == 3
            lines.append(
                "".join(words[1].replace('"', "").split()) if alternating and words[1:] else " ".join(words[1:])
            )
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = re.sub(r"\\f[BIRP]|\\f\(..|\\[&/,|^]|\\s[-+]?\d", "", "\n".join(lines))
    text = (
        text.replace(r"\-", "-").replace(r"\(aq", "'").replace(r"\(em", " - ").replace(r"\e", "\\").replace(r"\ ", " ")
    )
    yield from pieces(unwrap(tidy(text)))


def read_dictionary(path: str, content: bytes) -> Iterator[str]:
    """A DICT database: its entries in order, some two dozen a document."""
    text = re.sub(r"[{}]", "", _decode(path, content))
    entries = re.split(r"\n(?=\S)", tidy(text))
    for i in range(0, len(entries), 24):
        yield "\n\n".join(re.sub(r"\s*\n\s+", " ", entry).strip() for entry in entries[i : i + 24])


def read_glosses(path: str, content: bytes) -> Iterator[str]:
    """WordNet data: 'word: gloss' lines, two dozen a document."""
    lines = []
    for line in _decode(path, content).split("\n"):
        head, _, gloss = line.partition(" | ")
        fields = head.split(" ")
        if gloss and len(fields) > 4:
            lines.append(f"{fields[4].replace('_', ' ')}: {gloss.strip()}")
    for i in range(0, len(lines), 24):
        yield "\n".join(lines[i : i + 24])


def read_verses(path: str, content: bytes) -> Iterator[str]:
    """One JSON object a line with the words of one verse; a chapter becomes a paragraph."""
    chapters: dict[tuple[object, object], list[str]] = {}
    for line in _decode(path, content).splitlines():
        verse = json.loads(line)
        words = str(verse.get("text") or verse.get("t") or "")
        place = (verse.get("book") or verse.get("book_name") or verse.get("b"), verse.get("chapter") or verse.get("c"))
        chapters.setdefault(place, []).append(re.sub(r"[\[\]¶#]", "", words).strip())
    for verses in chapters.values():
        yield tidy(" ".join(verses))


def read_json_sentences(path: str, content: bytes) -> Iterator[str]:
    """Every string of a JSON tree that holds a sentence, in order, one a paragraph."""

    def walk(node: object) -> Iterator[str]:
        if isinstance(node, str):
            if len(node) > 60 and node.count(" ") > 8:
                yield html_text(node)
        elif isinstance(node, dict):
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    yield from pieces(tidy("\n\n".join(walk(json.loads(content)))))


def read_r_strings(path: str, content: bytes) -> Iterator[str]:
    """The lines of text in an R lazy-load database: length, then a zlib stream of serialised strings, repeated."""
    offset = 0
    while offset + 6 < len(content):
        stream = zlib.decompressobj()
        data = stream.decompress(content[offset + 4 :])
        offset = len(content) - len(stream.unused_data)
        lines = []
        for match in re.finditer(rb"\x00\x04\x00\x09(....)", data, re.S):
            length = int.from_bytes(match.group(1), "big")
            lines.append(data[match.end() : match.end() + length].decode("utf-8", "replace"))
        if len(lines) > 100:
            yield from pieces(unwrap(tidy("\n".join(lines))))


def read_python(path: str, content: bytes) -> Iterator[str]:
    """A Python file, less a leading comment that states a licence."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return
    lines = text.replace("\r\n", "\n").split("\n")
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
    if re.search(r"copyright|licen[cs]e|spdx", "\n".join(lines[:end]), re.I):
        lines = lines[end:]
    yield "\n".join(line.rstrip() for line in lines).expandtabs(4).strip("\n") + "\n"


READERS: dict[str, Reader] = {
    "dictionary": read_dictionary,
    "glosses": read_glosses,
    "html": read_html,
    "json-sentences": read_json_sentences,
    "man": read_man,
    "pod": read_pod,
    "python": read_python,
    "r-strings": read_r_strings,
    "rst": read_rst,
    "text": read_text,
    "verses": read_verses,
}
