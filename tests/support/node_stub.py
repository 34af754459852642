"""What a node calls at a coordinator, as tests do in its place."""

from __future__ import annotations

from typing import Any

import grpc

from lmkv.internal import PROTOCOL_VERSION
from lmkv.internal.v1.report_service_pb2_grpc import ReportServiceStub
from lmkv.v1.registry_service_pb2 import Instance, RegisterRequest
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub


class NodeStub:
    """`RegistryService` and `ReportService` over one channel."""

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel) -> None:
        registry: Any = RegistryServiceStub(channel)
        self.Register = registry.Register
        self.Deregister = registry.Deregister
        self.ListInstances = registry.ListInstances
        self.LocateInstance = registry.LocateInstance
        reports: Any = ReportServiceStub(channel)
        self.Report = reports.Report


def registration(instance: Instance, secret: bytes = b"") -> RegisterRequest:
    """The request by which a node of this version registers."""
    return RegisterRequest(instance=instance, secret=secret, protocol_version=PROTOCOL_VERSION)
