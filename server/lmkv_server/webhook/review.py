"""Answers an AdmissionReview of Kubernetes.

Every pod is admitted, changed or not: an engine starts without a cache rather than not at all.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from lmkv_server.webhook.additions import Additions, Object
from lmkv_server.webhook.injection import Operation, Refusal, inject, refuse

logger = logging.getLogger(__name__)

MAX_WARNING_CHARS = 250
"""Kubernetes shortens longer warnings."""


class InvalidReview(ValueError):
    """The request is no AdmissionReview of version v1."""


def review(body: object, additions: Mapping[str, Additions]) -> dict[str, Any]:
    """The response to a request. Raises `InvalidReview` if it cannot be answered."""
    if not isinstance(body, dict) or (body.get("apiVersion"), body.get("kind")) != (
        "admission.k8s.io/v1",
        "AdmissionReview",
    ):
        raise InvalidReview("the body must be an AdmissionReview of admission.k8s.io/v1")
    request = body.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise InvalidReview("the AdmissionReview has no request with a uid")
    kind = request.get("kind")
    if not isinstance(kind, dict) or not isinstance(kind.get("kind"), str):
        raise InvalidReview("the AdmissionReview has no request with a kind")
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    operations, warning = _change(request, additions)
    if operations:
        patch = base64.b64encode(msgspec.json.encode(operations)).decode()
        response |= {"patchType": "JSONPatch", "patch": patch}
    if warning:
        response["warnings"] = [f"lmkv is not used: {warning}"[:MAX_WARNING_CHARS]]
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "response": response}


def _change(request: Object, additions: Mapping[str, Additions]) -> tuple[list[Operation], str]:
    """Operations, and why the pod does not use lmkv; empty if it does."""
    pod = request.get("object")
    if request.get("operation") != "CREATE" or request["kind"]["kind"] != "Pod" or not isinstance(pod, dict):
        return [], ""
    metadata = pod.get("metadata")
    named = metadata if isinstance(metadata, dict) else {}
    name = f"{request.get('namespace', '')}/{named.get('name') or named.get('generateName', '')}"
    try:
        try:
            operations = inject(pod, additions)
        except Refusal as refusal:
            logger.warning("pod %s does not use lmkv: %s", name, refusal)
            return refuse(pod, str(refusal)), str(refusal)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        logger.exception("pod %s has a form that is not known", name)
        return [], "the pod has a form that is not known; the webhook's log has the details"
    logger.info("pod %s: %s", name, f"{len(operations)} changes" if operations else "no change")
    return operations, ""
