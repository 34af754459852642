"""What a node calls at a coordinator, as tests do in its place."""

from __future__ import annotations

from typing import Any

import grpc

from lmkv.internal.v1.report_service_pb2_grpc import ReportServiceStub
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
