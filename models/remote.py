"""The target behind OpenAI-compatible servers, in the place of our own engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conf.choices import ServerApi
from conf.schema import Config
from models.ability import TRIED, Requests, Trial
from models.anatomy import without_weights
from models.decoding.autoregressive import Answer
from models.endpoints import Broken, Endpoints
from models.jobs import Job
from models.laws import as_tensors
from models.load import Target
from models.recording import Writer, written
from models.served import Reader, Said, until_stop

SEEDS = 3  # tried where an answer has no readable token


class Remote:
    """Records what servers of the target answer. Its configuration and tokenizer are here; its
    weights need not be, and `model` has none.
    """

    device = "server"

    def __init__(self, config: Config, target: Target, say: Callable[[str], None]) -> None:
        self.config, self.target, self.say = config, target, say
        self.model = without_weights(
            target.config, trust_remote_code=config.target.trust_remote_code
        )
        self.reader = Reader(target.tokenizer)
        self.endpoints = Endpoints(config.generate.server, say)
        self.requests = Requests(config, config.generate.server.model)
        self.is_exact = False  # whether the servers give ids
        self.num_unreadable = 0
        self._is_open = False

    def open(self, jobs: Sequence[Job]) -> None:
        """Find out with a few prompts what the servers give. Raises ConfigError where that is less
        than the configuration asks for.
        """
        trial = Trial(self.config, self.endpoints, self.requests, self.reader, self.say)
        (said,) = self.endpoints.map(trial.run, [jobs[:TRIED]])
        self.is_exact, self._is_open = bool(said.tokens), True
        num_ids = self.requests.num_ids
        gives = f"the {num_ids} likeliest ids" if self._has_laws else "no laws"
        ids = "tokens by id" if self.is_exact else "texts, which the target's tokenizer reads"
        self.say(f"generate: {self.requests.model} gives {ids}; of a position, {gives}.")
        if self.config.generate.record_prompts:
            self.say("generate: prompts' own laws are not recorded, which servers do not give.")

    @property
    def _has_laws(self) -> bool:
        return self.config.generate.server.laws

    def manifest(self) -> dict[str, Any]:
        """What is to be known of the recording."""
        if not self._is_open:  # everything was there already
            return {"kind": "server", "laws": self._has_laws}
        return {
            "kind": "server",
            "laws": self._has_laws,
            "model": self.requests.model,
            "api": str(self.config.generate.server.api),
            "ids_per_law": self.requests.num_ids if self._has_laws else 0,
            "ids": "given by the server" if self.is_exact else "of the text, by the tokenizer",
            "num_unreadable": self.num_unreadable,
        }

    def record(self, jobs: Sequence[Job], writer: Writer) -> Iterator[Answer]:
        """Answer jobs, none of which waits for another, and write what was recorded, also when the
        servers fail. An answer that holds no readable token is left out and counted.

        Raises ServerError when the servers stay away or send nonsense.
        """
        if not self._is_open:
            self.open(jobs)
        yield from written(self._readable(jobs), jobs, writer, self.config.generate.mass)

    def _readable(self, jobs: Sequence[Job]) -> Iterator[Answer]:
        for answer in self.endpoints.map(self._answer, jobs):
            if answer is None:
                self.num_unreadable += 1
            else:
                yield answer

    def close(self) -> None:
        """The servers are left as they are."""

    async def _answer(self, job: Job) -> Answer | None:
        most = self.config.generate.max_new_tokens
        for attempt in range(SEEDS if job.temperature > 0 else 1):
            body = self.requests.body(job, most, attempt=attempt)
            said = await self.endpoints.post(self.requests.path, body, self._read)
            tokens = self._tokens(said)[:most]
            if tokens:
                laws = await self._laws(job, tokens, said)
                num_ids = self.requests.num_ids if self._has_laws else 0
                ids_MK, log_p_MK = as_tensors(laws, num_ids)
                return Answer(
                    job.index, job.prompt, job.temperature, tokens, log_p_MK, ids_MK, None
                )
        return None

    def _read(self, tree: Any) -> Said:
        said = self.reader.read(tree)
        if said.tokens is not None:
            said = until_stop(said, self.target.stop_ids)
            if max(said.tokens or [0]) >= self.target.config.vocab_size:
                raise Broken("ids that the target does not have")
        is_blind = said.tokens is None or (len(said.tokens) > 0 and said.laws is None)
        if self._has_laws and said.text and is_blind:
            raise Broken("an answer without ids and log-probabilities")
        return said

    def _tokens(self, said: Said) -> list[int]:
        """Ids of an answer; the last is a stop id where the target ended it."""
        tokens, is_whole = said.tokens, said.is_whole
        if tokens is None or not (is_whole or self._has_laws):
            tokens = list(self.target.tokenizer(said.text, add_special_tokens=False).input_ids)
            is_whole = True
        # some servers leave the stop id out, some stop at special ids that are none of ours
        ends = {*self.target.stop_ids, *self.target.tokenizer.all_special_ids}
        if is_whole and said.ended and not (tokens and tokens[-1] in ends):
            tokens = [*tokens, self.target.tokenizer.eos_token_id]
        return tokens

    async def _laws(
        self, job: Job, tokens: Sequence[int], said: Said
    ) -> Sequence[dict[int, float]]:
        """A law for each token; one of which nothing is known has no ids."""
        if not self._has_laws:
            return [{} for _ in tokens]
        laws = (said.laws or [])[: len(tokens)]
        if len(laws) < len(tokens):  # the server leaves the end out
            laws.append(await self._law_behind(job, tokens[: len(laws)]))
        return laws

    async def _law_behind(self, job: Job, tokens: Sequence[int]) -> dict[int, float]:
        if self.config.generate.server.api is ServerApi.chat:
            return {}  # an answer cannot be gone on with
        body = self.requests.body(job, 1, after=tokens)
        said = await self.endpoints.post(self.requests.path, body, self.reader.read)
        return said.laws[0] if said.laws else {}
