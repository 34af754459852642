"""Codecs on aarch64, run by an emulator: the same bits, by vectors of NEON that the compiler finds by itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lmkv_kernels.codecs import CODES, ELEMENTS, CodecFormat
from tests.kernels.test_codecs import bytes_of, random_elements

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
SOURCES = Path(__file__).parents[2] / "kernels" / "csrc"
PLANE, GROUP, COUNT = 700, 300, 5003

pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="needs the Debian packages g++-aarch64-linux-gnu and qemu-user"
)


def compiled(target: Path, *arguments: str) -> str:
    """Compiles as CMakeLists.txt says; what the compiler reports."""
    options = ("-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-I", str(SOURCES), "-o", str(target))
    command = [COMPILER or "", *options, *arguments, str(SOURCES / "codec.cpp")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def test_loops_over_elements_are_vectorized(tmp_path: Path) -> None:
    report = compiled(tmp_path / "codec.o", "-c", "-fopt-info-vec-all")
    lines = (SOURCES / "codec.cpp").read_text().splitlines()
    loops = {number for number, line in enumerate(lines, start=1) if "++i)" in line}
    vectorized = {int(line) for line in re.findall(r"codec.cpp:(\d+):\d+: optimized: loop vectorized", report)}
    missed = {int(line) for line in re.findall(r"codec.cpp:(\d+):\d+: missed: couldn't vectorize loop", report)}
    assert loops - vectorized | loops & missed == set()


def test_bits_are_those_of_this_processor(tmp_path: Path) -> None:
    program = tmp_path / "codec"
    compiled(program, "-static", str(Path(__file__).parent / "codec_by_hand.cpp"))
    for element, code in product(ELEMENTS, CODES):
        raw = bytes_of(random_elements(element, COUNT, seed=1, exponent=0))
        kind = CodecFormat(element=element, code=code, plane_elements=PLANE, group_elements=GROUP)
        encoded, decoded = np.zeros(kind.encoded_bytes(raw.size), np.uint8), np.zeros_like(raw)
        assert kind.encode(raw, encoded)
        kind.decode(encoded, decoded)
        numbers = (ELEMENTS.index(element), CODES.index(code), PLANE, GROUP, COUNT)
        command = [EMULATOR or "", str(program), *map(str, numbers)]
        found = subprocess.run(command, check=True, capture_output=True, input=raw.tobytes()).stdout
        assert found == encoded.tobytes() + decoded.tobytes(), (element, code)
