"""The drafter's settings: ranges, names, the allow-list."""

import dataclasses

import pytest

from specla.drafter_service.config import BY_NAME, DrafterConfig
from specla.rpc.errors import InvalidRequestError
from specla.rpc.settings import ServingConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "loookup"),
        ("port", 70000),
        ("max_nodes", 0),
        ("max_nodes", 129),
        ("tau", float("nan")),
        ("tau", 0.0),
        ("min_ngram", 0),
        ("max_ngram", 1),
        ("branching", 0),
        ("random_probability", 0.0),
        ("oracle_rate", 1.5),
        ("host", "0.0.0.0"),
        ("allow_verifiers", ("verifier",)),
        ("allow_verifiers", ("dns:///verifier:1",)),
        ("allow_verifiers", ("ver*:1",)),
    ],
)
def test_refuses_what_cannot_work_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        DrafterConfig(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
    assert refused.value.hint


def test_an_unknown_drafter_is_told_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"Known here: none, lookup, suffix, random, oracle$"):
        DrafterConfig(name="guess")


def test_an_oracle_needs_its_file() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        DrafterConfig(name="oracle")
    assert refused.value.field == "oracle_file"
    assert "no recorded text" in refused.value.message


def test_a_name_alone_is_enough_for_all_but_an_oracle() -> None:
    assert [DrafterConfig.of_name(name).name for name in BY_NAME] == ["none", "lookup", "suffix", "random"]
    for name, says in (("oracle", "runs as a service only"), ("guess", "no drafter is called 'guess'")):
        with pytest.raises(InvalidRequestError, match=f"{says}. Known here: none, lookup, suffix, random$") as refused:
            DrafterConfig.of_name(name)
        assert refused.value.field == "drafters"


def test_every_field_has_a_default_and_a_description() -> None:
    for field in dataclasses.fields(DrafterConfig):
        assert field.default is not dataclasses.MISSING
        described = f"{ServingConfig.__doc__}{DrafterConfig.__doc__}"
        assert f"\n        {field.name}: " in described


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1:50061", True),
        ("localhost:1", True),
        ("[::1]:50061", True),
        ("verifier:50061", True),
        ("verifier:50062", False),
        ("a.pods.local:9", True),
        ("pods.local:9", False),
        ("evilpods.local:9", False),
        ("a.pods.local:10", False),
        ("10.0.0.1:50061", False),
        ("dns:///verifier:50061", False),
        ("unix:/tmp/socket:1", False),
        ("127.0.0.1:1,10.0.0.1:50061", False),
        ("verifier:*", False),
        ("verifier", False),
        ("", False),
    ],
)
def test_only_listed_verifiers_are_allowed(address: str, allowed: bool) -> None:
    patterns = (*DrafterConfig().allow_verifiers, "verifier:50061", "*.pods.local:9")
    assert DrafterConfig(allow_verifiers=patterns).allows(address) is allowed


def test_any_verifier_can_be_allowed_in_so_many_words() -> None:
    assert DrafterConfig(allow_verifiers=("*:*",)).allows("10.0.0.1:5")
