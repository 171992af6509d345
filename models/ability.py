"""What a server gives, found out with a few prompts, and the requests that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.choices import ServerApi
from conf.errors import ConfigError, require
from conf.schema import Config
from data.chat import with_system_prompt
from models.endpoints import Endpoints, Refused
from models.jobs import Job
from models.laws import require_same_law
from models.served import Reader, Said

# the whole law at its temperature, which servers narrow down unless told, and ids beside texts;
# OpenAI's own parameters have no such words
WHOLE_LAW = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
AS_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
MOST_IDS = (20, 5)  # of servers that limit them: vLLM and OpenAI's chats, OpenAI's completions
TRIED = 8  # prompts at most
PROBED = 8  # tokens of the answer that shows what a server can


@dataclass
class Requests:
    """Bodies of requests, in the words that the servers know.

    Args:
        model: their name of the target.
        more: parameters beyond OpenAI's.
        num_ids: that are asked for of each law; 0: no laws.
    """

    config: Config
    model: str
    more: dict[str, Any] = field(default_factory=dict)
    num_ids: int = 0

    @property
    def path(self) -> str:
        """Where they are sent."""
        is_chat = self.config.generate.server.api is ServerApi.chat
        return "/chat/completions" if is_chat else "/completions"

    def body(
        self,
        job: Job,
        max_tokens: int,
        *,
        after: Sequence[int] = (),
        attempt: int = 0,
        temperature: float | None = None,
    ) -> dict[str, Any]:
        """Asks for so many tokens of a job's answer, behind its first tokens `after`."""
        body = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": job.temperature if temperature is None else temperature,
            "top_p": 1.0,
            "seed": job.seed(self.config.seed, attempt),
            **self.more,
        }
        if self.config.generate.server.api is ServerApi.chat:
            body["messages"] = with_system_prompt(job.messages, self.config.target.system_prompt)
            laws: dict[str, Any] = {"logprobs": True, "top_logprobs": self.num_ids}
        else:
            body["prompt"] = [*job.prompt, *after]
            laws = {"logprobs": self.num_ids}
        return body | (laws if self.num_ids else {})


@dataclass
class Trial:
    """Finds out with a few jobs what servers give, and sets `requests` to ask for it.

    Raises ConfigError where that is less than the configuration asks for.
    """

    config: Config
    endpoints: Endpoints
    requests: Requests
    reader: Reader
    say: Callable[[str], None]

    async def run(self, jobs: Sequence[Job]) -> Said:
        """What a server said at last. The answers to the other jobs are asked for where no token of
        those before can be read.
        """
        if not self.requests.model:
            self.requests.model = await self._only_model()
        for job in jobs:
            said = await self._try_out(job)
            if not self.config.generate.server.laws or (said.tokens and said.laws):
                break
        self._require_same_prompt(job, said)
        if self.config.generate.server.laws:
            require(
                bool(said.tokens and said.laws),
                "generate.server.laws",
                "true",
                "the server gives no log-probabilities of tokens that can be told apart",
                "Use generate.server.laws=false and objective=hard",
            )
            await self._require_laws_at_one(job, said)
        return said

    async def _ask(self, job: Job, num_tokens: int, temperature: float) -> Said:
        body = self.requests.body(job, num_tokens, temperature=temperature)
        return await self.endpoints.post(self.requests.path, body, self.reader.read)

    async def _only_model(self) -> str:
        tree = await self.endpoints.get("/models")
        try:
            names = [str(entry["id"]) for entry in tree["data"]]
        except (LookupError, TypeError):
            names = []
        require(
            len(names) == 1,
            "generate.server.model",
            "''",
            f"the server has {len(names)} models ({', '.join(names[:8])})",
            "Name the target among them",
        )
        return names[0]

    async def _try_out(self, job: Job) -> Said:
        """The answer to the first request that a server takes: all that is wanted, or less."""
        laws, wanted = self.config.generate.server.laws, self.config.generate.top_k
        first: Refused | None = None
        # without laws, one id of each shows at least which token it was
        numbers = [wanted, *(n for n in MOST_IDS if n < wanted)] if laws else [1, 0]
        for more in ({**WHOLE_LAW, **AS_IDS}, {}):
            for number in numbers:
                self.requests.more, self.requests.num_ids = dict(more), number
                try:
                    said = await self._ask(job, PROBED, 1.0)
                except Refused as refused:
                    first = first or refused
                    continue
                if laws and number < wanted:
                    self.say(
                        f"generate: the server gives {number} ids of a position, fewer than"
                        f" generate.top_k={wanted}."
                    )
                return said
        assert first is not None
        raise first

    def _require_same_prompt(self, job: Job, said: Said) -> None:
        """What is recorded is what the server read."""
        if said.num_prompt in (None, len(job.prompt)):
            return
        difference = (
            f"the server reads {said.num_prompt} tokens where the target's tokenizer and chat"
            f" template make {len(job.prompt)}"
        )
        server = self.config.generate.server
        if server.laws:
            raise ConfigError(
                f"generate.server.api={server.api}: {difference}, so its laws are those of another"
                " text. Use a server that takes ids (generate.server.api=completions), or"
                " generate.server.laws=false and objective=hard."
            )
        self.say(f"generate: {difference}; its answers are recorded behind the latter.")

    async def _require_laws_at_one(self, job: Job, said: Said) -> None:
        assert said.laws is not None
        temperatures = self.config.generate.all_temperatures
        for temperature in sorted({*temperatures} - {1.0}):
            other = await self._ask(job, 1, temperature)
            require_same_law(
                said.laws[0],
                other.laws[0] if other.laws else {},
                temperature,
                temperatures,
                whose="the server's",
                way_out="let the server give them as they are before sampling (vLLM:"
                " --logprobs-mode raw_logprobs; SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB=1)",
            )
