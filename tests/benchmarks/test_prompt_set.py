"""Files of prompts: the shipped one is read, others are refused with what is wrong in which line."""

from pathlib import Path

import pytest

from specla.benchmarks.prompt_set import load
from specla.rpc.errors import InvalidRequestError

LINE = '{"id": "a", "domain": "prose", "text": "hello"}\n'


def test_a_limit_keeps_every_domain() -> None:
    domains = {prompt.domain for prompt in load()}
    assert {prompt.domain for prompt in load(limit=3 * len(domains))} == domains


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompts"),
        (LINE + "{}\n", "line 2 is no prompt"),
        ("[]\n", "line 1 is no prompt"),
        (LINE.replace("}", ', "more": ""}'), "line 1 is no prompt"),
        ("\n" + LINE[:-2], "line 2 is not JSON"),
        (LINE.replace("hello", ""), "line 1 holds something else than text, or nothing"),
        (LINE.replace('"a"', "7"), "line 1 holds something else than text, or nothing"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=message) as refused:
        load(path)
    assert refused.value.field == "prompts"
    assert "{id, domain, text}" in refused.value.hint


def test_what_cannot_be_read_or_is_of_other_domains_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            load(path)
    with pytest.raises(InvalidRequestError, match="no prompts of domain 'verse'"):
        load(domain="verse")
