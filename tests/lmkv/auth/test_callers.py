"""The tokens file: whom it knows, and how it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmkv.auth.caller import Role
from lmkv.auth.callers import read_callers
from lmkv.errors import ConfigError
from tests.support.tokens import entry, sha256, write


def test_who_shows_a_token_is_known_by_its_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.yaml", entry("engine", "team-a"), entry("reader"), team_a={"max_chunks": 7})
    callers, files = read_callers(path)
    engine = callers.find("engine-of-team-a-token")
    assert engine is not None
    assert (engine.name, engine.role, engine.tenant) == ("engine-of-team-a", Role.ENGINE, "team-a")
    assert callers.find("reader-token") is not None
    for stranger in ("", "reader", "reader-token ", sha256("reader-token")):
        assert callers.find(stranger) is None
    assert callers.tenants == {"", "team-a", "team_a"}
    assert callers.quotas["team_a"].max_chunks == 7
    assert files == [path]


def test_a_token_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "grafana").write_text("plain\n")
    path = write(tmp_path / "tokens.yaml", {"name": "grafana", "role": "reader", "file": str(tmp_path / "grafana")})
    callers, files = read_callers(path)
    assert callers.find("plain") is not None
    assert files == [path, str(tmp_path / "grafana")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens: [{name: a, role: king, sha256: s}]", r"Invalid enum value 'king' - at `\$.tokens\[0\].role`"),
        ("tokens: [{name: a, role: reader}]", "a needs either sha256 .* or file"),
        (f"tokens: [{{name: a, role: reader, sha256: {sha256('x')}, file: y}}]", "a needs either sha256 .* or file"),
        ("tokens: [{name: a, role: reader, sha256: s3cret}]", r"at `\$.tokens\[0\].sha256`"),
        ("tokens: [{name: a, role: reader, token: s3cret}]", "unknown field `token`"),
        ("tokens: [{name: a b, role: reader, file: s}]", r"at `\$.tokens\[0\].name`"),
        ("tokens: [{name: a, role: reader, file: /nowhere}]", "a: file: cannot read /nowhere"),
        ("s3cret", "Expected `object`, got `str`"),
        ("tokens: [\n s3cret: {", "is not valid YAML, line 2"),
        ("tenants: {}", "missing required field `tokens`"),
    ],
)
def test_what_is_wrong_is_named_and_no_token_is_quoted(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"auth_tokens: .*{says}") as refusal:
        read_callers(str(path))
    assert "s3cret" not in str(refusal.value)


def test_one_token_is_one_callers(tmp_path: Path) -> None:
    twice = [{"name": name, "role": "reader", "sha256": sha256("same")} for name in ("a", "b")]
    with pytest.raises(ConfigError, match="gives one token to two callers"):
        read_callers(write(tmp_path / "tokens.yaml", *twice))


def test_the_file_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(# auth_tokens.*?)```", page, re.DOTALL)
    for name in ("router-a", "prometheus", "root"):
        (tmp_path / name).write_text(f"{name}-token")
    path = tmp_path / "tokens.yaml"
    path.write_text(text.replace("/run/secrets", str(tmp_path)))
    callers, _ = read_callers(str(path))
    router = callers.find("router-a-token")
    assert router is not None
    assert (router.role, router.tenant) == (Role.OPERATOR, "team-a")
    assert callers.quotas.keys() == {"team-a"}


def test_the_documentation_lists_every_role() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    assert all(f"| `{role}` |" in page for role in Role)
