"""Images of another version, for fleets in which pods of two versions run at the same time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from tests.cluster.translation import Manifest, Pod


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """Where the images of a version are."""

    registry: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """What the names of its images begin with, and their tag: `localhost/previous:0.1.0`. Raises `ValueError`."""
        registry, _, tag = text.rpartition(":")
        if not registry or not tag or "/" in tag:
            raise ValueError(f"{text!r} is not REGISTRY:TAG, such as localhost/previous:0.1.0")
        return cls(registry=registry, tag=tag)

    def __str__(self) -> str:
        return f"{self.registry}:{self.tag}"

    def image(self, name: str) -> str:
        """The image of this version in place of another: `localhost/previous/lmkv-node:0.1.0` of `a/lmkv-node:2`."""
        return f"{self.registry}/{name.rpartition('/')[2].partition(':')[0]}:{self.tag}"

    def pod(self, pod: Pod) -> Pod:
        """The same pod with the images of this version. Configuration and command lines are those of its manifest."""

        def changed(containers: list[Manifest]) -> list[Manifest]:
            return [{**each, "image": self.image(each["image"])} for each in containers]

        listed: Manifest = {
            name: changed(pod.spec[name]) for name in ("initContainers", "containers") if name in pod.spec
        }
        return dataclasses.replace(pod, spec={**pod.spec, **listed})
