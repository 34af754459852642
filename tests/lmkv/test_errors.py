from __future__ import annotations

import inspect

import grpc
import pytest

from lmkv import errors
from lmkv.errors import ConfigError, Full, LmkvError, Unreachable

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, LmkvError)]


def test_every_class_has_a_reason_of_its_own() -> None:
    reasons = [cls.reason for cls in CLASSES]
    assert len(set(reasons)) == len(reasons)
    own = {reason: cls for reason, cls in LmkvError.by_reason.items() if cls.__module__ == LmkvError.__module__}
    assert {cls.reason: cls for cls in CLASSES if cls is not LmkvError} == own


@pytest.mark.parametrize("cls", CLASSES)
def test_every_code_is_a_grpc_status(cls: type[LmkvError]) -> None:
    assert cls.code in grpc.StatusCode.__members__


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_says_what_it_means(cls: type[LmkvError]) -> None:
    assert cls.__dict__["__doc__"]


def test_a_subclass_has_the_code_of_its_kind() -> None:
    for cls in CLASSES:
        kind = cls.__mro__[1]
        if kind not in (LmkvError, Exception):
            assert issubclass(kind, LmkvError)
            assert cls.code == kind.code


def test_metadata_holds_the_dynamic_words_as_text() -> None:
    error = LmkvError("page 7 is gone", page=7, who=None)
    assert str(error) == "page 7 is gone"
    assert error.metadata == {"page": "7", "who": "None"}


def test_one_except_clause_catches_everything() -> None:
    for cls in (Unreachable, ConfigError):
        with pytest.raises(LmkvError):
            raise cls("no")


def test_who_has_no_room_says_when_to_come_back() -> None:
    assert Full("no", retry_seconds=2.5).retry_seconds == 2.5
    for said in ({}, {"retry_seconds": "soon"}):
        assert Full("no", **said).retry_seconds == 1.0
    assert Full("no", retry_seconds=-1).retry_seconds == 0.0
