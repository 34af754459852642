"""Cache salts that follow from identity."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.auth.cache_salts import TENANT, USER, CacheSalts

SECRET = "of the fleet"
names = st.text(max_size=8)


@given(st.lists(st.tuples(names, names, names), min_size=2, max_size=6, unique=True))
def test_different_fields_have_different_salts(fields: list[tuple[str, str, str]]) -> None:
    salts = CacheSalts(USER, SECRET)
    assert len({salts.derive(*one) for one in fields}) == len(fields)


@given(names, names, names, names)
def test_a_client_cannot_escape_its_tenant(user: str, wish: str, other_user: str, other_wish: str) -> None:
    for policy in (TENANT, USER):
        salts = CacheSalts(policy, SECRET)
        assert salts.derive("a", user, wish) != salts.derive("b", other_user, other_wish)


def test_users_of_a_tenant_share_unless_the_policy_separates_them() -> None:
    by_tenant, by_user = CacheSalts(TENANT, SECRET), CacheSalts(USER, SECRET)
    assert by_tenant.derive("a", "one") == by_tenant.derive("a", "two")
    assert by_user.derive("a", "one") != by_user.derive("a", "two")
    assert by_user.derive("a", "one") == by_user.derive("a", "one")


def test_fields_are_not_run_together() -> None:
    salts = CacheSalts(USER, SECRET)
    cuts = [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abcd", "", ""), ("", "abcd", ""), ("", "", "abcd")]
    assert all(salts.derive(*one) != salts.derive(*other) for one, other in itertools.combinations(cuts, 2))


@pytest.mark.parametrize("secret", ["another", SECRET + " "])
def test_a_client_without_the_secret_cannot_compute_salts(secret: str) -> None:
    assert CacheSalts(TENANT, secret).derive("a") != CacheSalts(TENANT, SECRET).derive("a")


def test_salts_are_stable_and_engines_accept_them() -> None:
    salt = CacheSalts(TENANT, SECRET).derive("a", wish="\ud800 any text" * 100)
    assert len(salt) == 64
    assert set(salt) <= set("0123456789abcdef")
    assert CacheSalts(TENANT, SECRET).derive("a") == GOLDEN, "a changed derivation empties the caches of fleets"


GOLDEN = "703282c5f748836ce09c2a93b1764596802e8e69444386868311871ee57b462c"
