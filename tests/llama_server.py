"""A real server for tests: llama.cpp with an OpenAI-compatible API, as a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx = 4, 4 * 512
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.api_keys = sys.argv[3:]
server = xllamacpp.Server(params)
while True:
    time.sleep(60)
"""


@dataclass
class LlamaServer:
    """Serves a GGUF file at `url`; may be killed and started again at the same address."""

    model: Path
    port: int
    keys: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Return once it answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, str(self.model), str(self.port), *self.keys],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + 120
        while not self._is_healthy():
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < limit, "the server does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        """As a crash ends it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _is_healthy(self) -> bool:
        health = f"{self.url.removesuffix('/v1')}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextmanager
def llama_server(model: Path, keys: tuple[str, ...] = ()) -> Iterator[LlamaServer]:
    """A running server on a free port of loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = LlamaServer(model, port, keys)
    try:
        server.start()
        yield server
    finally:
        server.kill()
