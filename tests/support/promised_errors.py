"""The errors that the protos promise for each RPC."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf.descriptor import MethodDescriptor

PROTOS = Path(__file__).parents[2] / "protos"


def promises(method: MethodDescriptor) -> set[tuple[str, str]]:
    """Codes and reasons that the proto lists for an RPC; besides them success, and that it is not implemented yet."""
    if method.containing_service.full_name == "google.longrunning.Operations":  # whose proto is not ours
        bad = {("INVALID_ARGUMENT", "BAD_PAGE_TOKEN"), ("INVALID_ARGUMENT", "BAD_MESSAGE")}
        return {("OK", ""), ("NOT_FOUND", "OPERATION_NOT_FOUND"), *bad}
    file = (PROTOS / method.containing_service.file.name).read_text()
    comments = re.findall(rf"((?: *//.*\n)*) *(?:service {method.containing_service.name}|rpc {method.name}\()", file)
    assert len(comments) == 2
    found = re.findall(r"\* `([A-Z_]+)` \(`([A-Z0-9_]+)`\):", "".join(comments))
    return {("OK", ""), ("UNIMPLEMENTED", ""), *found}
