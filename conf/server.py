"""Settings of the servers that answer prompts with `generate.engine=server`."""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.choices import ServerApi
from conf.errors import require


@dataclass
class ServerConfig:
    """OpenAI-compatible servers of the target. Only `model`, `api` and `laws` determine what is
    recorded: a run may go on with other servers of the same target.
    """

    # their APIs, for example [http://localhost:8000/v1]; several share the work
    urls: list[str] = field(default_factory=list)
    model: str = ""  # what they call the target; empty: the only model they have
    api: ServerApi = ServerApi.completions
    # record their top log-probabilities; false: their tokens alone, for objective=hard
    laws: bool = True
    api_key_env: str = ""  # the environment variable that holds their key; empty: no key
    in_flight: int = 32  # requests at a time, of each server
    timeout_s: float = 600.0  # of one request
    # how long all of them may be silent before the run stops; what is recorded then is kept
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")),
                "generate.server.urls",
                url,
                "it is no address of a server",
                "Use for example http://localhost:8000/v1",
            )
        require(
            self.in_flight >= 1,
            "generate.server.in_flight",
            self.in_flight,
            "nothing would be asked",
            "Use 1 or more",
        )
        for key in ("timeout_s", "patience_s"):
            value = getattr(self, key)
            require(value > 0, f"generate.server.{key}", value, "it is a time", "Use 60 seconds")
