"""Tiny tokenizer, models and manifests, built in a moment: no weights are downloaded."""

from __future__ import annotations

import functools
import textwrap
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from conf.contracts import (
    Acceptance,
    BeforeAfter,
    Corpus,
    Cost,
    Draft,
    ExpectedAcceptance,
    Interval,
    Lessons,
    Provenance,
    Rates,
    Report,
    Result,
    Shard,
    SplitLessons,
)
from conf.run import Run, fingerprint, write_atomically

VOCAB_SIZE = 300
TARGET = {  # what manifests say about the target
    "name": "tiny-target",
    "vocab_size": VOCAB_SIZE,
    "num_layers": 6,
    "hidden_size": 32,
    "parameters": 78_000,
    "dtype": "float32",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OTHER_VOCAB_SIZE = 280
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _trained_bpe(
    vocab_size: int, special_tokens: tuple[str, ...], *, ascii_only: bool = False
) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=[] if ascii_only else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(textwrap.__file__).read_text(encoding="utf-8")], trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, ascii_only: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 ids with a ChatML template; pad is eos, as in the SmolLM2 family.

    `ascii_only`: without tokens of single bytes that are part of a character.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            _trained_bpe(VOCAB_SIZE, SPECIAL_TOKENS, ascii_only=ascii_only)
        ),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB_SIZE
    return tokenizer


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Of 280 ids: fewer merges, other ids and other names of the special tokens."""
    special = ("<bos>", "<|im_start|>", "<eos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe(OTHER_VOCAB_SIZE, special)),
        bos_token="<bos>",
        eos_token="<eos>",
    )


def tiny_model(num_layers: int = 2, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random float32 Llama, hidden 32, 4 heads over 2; `changes` go to its LlamaConfig."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        # wider than the usual 0.02: laws far from uniform, hence no near-ties under greedy
        "initializer_range": 0.5,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model.eval()


def tiny_result(
    category: str = "all", temperature: float = 0.0, gamma: int = 1, speedup: float = 1.31
) -> Result:
    """A row whose counts agree with each other."""
    num_calls, tested, accepted = 400, 500, 240
    return Result(
        category=category,
        temperature=temperature,
        gamma=gamma,
        acceptance_rate=accepted / tested,
        acceptance_length=1 + accepted / num_calls,
        acceptance_length_histogram=[num_calls - accepted, accepted] + [0] * (gamma - 1),
        position_acceptance=[accepted / num_calls] + [0.0] * (gamma - 1),
        conditional_acceptance=[accepted / tested] + [0.0] * (gamma - 1),
        draft_utilisation=accepted / (num_calls * gamma),
        num_prompts=24 if category == "all" else 4,
        num_tokens=num_calls + accepted,
        num_target_calls=num_calls,
        target_call_widths=[0] * gamma + [num_calls],
        num_draft_steps=num_calls * gamma,
        num_drafted=num_calls * gamma,
        num_tested=tested,
        num_accepted=accepted,
        tokens_per_second=Rates(autoregressive=20.0, speculative=20.0 * speedup),
        speedup=Interval(median=speedup, low=speedup - 0.08, high=speedup + 0.07),
        predicted_speedup=speedup + 0.05,
        efficiency=speedup / (speedup + 0.05),
        identical_outputs=1.0 if temperature == 0 else None,
    )


def tiny_provenance() -> Provenance:
    return Provenance(
        git_commit="0123456789abcdef0123456789abcdef01234567",
        command="python -m train name=tiny",
        seed=7,
        device="cpu",
        created="2026-11-30T05:00:00+00:00",
        packages={"torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.9"},
        seconds=61.0,
    )


def _acceptance(value: float) -> Acceptance:
    return Acceptance(value=value, low=value - 0.012, high=value + 0.013, count=5120)


def tiny_corpus(**changes: Any) -> Corpus:
    """A Corpus manifest: two sources, nothing dropped."""
    sources = {
        "questions": {"kind": "file", "category": "chat", "path": "/home/me/questions.jsonl"},
        "functions": {"kind": "stdlib", "category": "code", "path": ""},
    }
    determined_by: dict[str, Any] = {"seed": 7, "data": {"num_train": 40, "sources": sources}}
    values: dict[str, Any] = {
        "fingerprint": fingerprint(determined_by),
        "determined_by": determined_by,
        "provenance": tiny_provenance(),
        "num_prompts": {"train": {"chat": 20, "code": 20}, "validation": {"chat": 4, "code": 4}},
        "num_by_source": {"questions": 24, "functions": 24},
        "dropped": {},
        "overlap_with_suites": {"mtbench": 0, "humaneval": 0},
        "num_masked": 0,
        "suites": {"mtbench": 12, "humaneval": 12},
    }
    return Corpus(**{**values, **changes})


def tiny_lessons(**changes: Any) -> Lessons:
    """A Lessons manifest; the shards that it names are not there."""
    determined_by: dict[str, Any] = {
        "seed": 7,
        "corpus": tiny_corpus().fingerprint,
        "target": {"path": "somebody/tiny-target", "revision": "main", "gguf": False},
        "generate": {"max_prompt_tokens": 224, "max_new_tokens": 160, "temperatures": [0.0, 1.0]},
    }
    values: dict[str, Any] = {
        "fingerprint": fingerprint(determined_by),
        "determined_by": determined_by,
        "provenance": tiny_provenance(),
        "target": dict(TARGET),
        "splits": {"train": _split(40), "validation": _split(8)},
        "num_skipped_prompts": 0,
        "top_k": 48,
        "mean_recorded_mass": 0.98,
        "bytes_per_token": 210.0,
        "tokens_per_second": 300.0,
        "seconds": 12.0,
    }
    return Lessons(**{**values, **changes})


def _split(num_rows: int) -> SplitLessons:
    num_tokens = num_rows * 30
    shard = Shard(
        file="shard-00000.safetensors",
        sha256="0" * 64,
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_bytes=num_tokens * 210,
    )
    return SplitLessons(
        shards=[shard],
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_prompt_tokens=num_rows * 20,
        num_laws=num_rows * 50,
        num_truncated=num_rows // 8,
        num_empty=0,
        num_looping=0,
        num_duplicates=0,
        rows_by_category={"chat": num_rows // 2, "code": num_rows // 2},
        tokens_by_temperature={"0.0": num_tokens // 2, "1.0": num_tokens // 2},
    )


def tiny_draft(**changes: Any) -> Draft:
    """A Draft manifest of a two-layer draft of a tiny target."""
    determined_by: dict[str, Any] = {
        "seed": 7,
        "lessons": tiny_lessons().fingerprint,
        "objective": {"divergence": "forward_kl", "finish": None},
        "optim": {"name": "muon", "lr": 0.01},
        "draft": {"init": "layers", "warm_start": True},
    }
    values: dict[str, Any] = {
        "fingerprint": fingerprint(determined_by),
        "determined_by": determined_by,
        "provenance": tiny_provenance(),
        "parameters": 34_000,
        "num_layers": 2,
        "layers": [0, 1],
        "num_bytes": 136_000,
        "hot_vocab": 0,
        "expected_acceptance": BeforeAfter(before=_acceptance(0.26), after=_acceptance(0.43)),
        "best_step": 800,
        "num_steps": 1000,
        "num_tokens_seen": 412_345,
        "tokens_per_second": 950.0,
        "seconds": 431.0,
    }
    return Draft(**{**values, **changes})


def tiny_report(**changes: Any) -> Report:
    """Two categories and "all", greedy and sampled, gamma 1 to 3; the best gamma is 2."""
    speedups = {1: 1.22, 2: 1.31, 3: 1.25}
    results = [
        tiny_result(category, temperature, gamma, speedup - (0.11 if temperature else 0) + offset)
        for temperature in (0.0, 1.0)
        for gamma, speedup in speedups.items()
        for category, offset in (("all", 0.0), ("chat", -0.04), ("code", 0.06))
    ]
    best = next(
        row for row in results if row.category == "all" and row.temperature == 0 and row.gamma == 2
    )
    determined_by: dict[str, Any] = {
        "seed": 7,
        "eval": {
            "confidence": 0.9,
            "max_new_tokens": 64,
            "suites": {"mtbench": {"category": "chat"}, "humaneval": {"category": "code"}},
        },
    }
    values: dict[str, Any] = {
        "fingerprint": fingerprint(determined_by),
        "determined_by": determined_by,
        "provenance": tiny_provenance(),
        "name": "tiny",
        "target": dict(TARGET),
        "draft": {"parameters": 34_000, "layers": [0, 1], "bytes": 136_000, "hot_vocab": 0},
        "machine": {"device": "cpu", "cores": 2, "dtype": "bfloat16", "compiled": True},
        "cost": Cost(
            draft_step_ms=6.1,
            target_step_ms=43.2,
            c=0.141,
            v={"1": 1.0, "2": 1.04, "3": 1.07, "4": 1.09},
            compile_seconds=21.0,
            target_bytes=312_000,
            draft_bytes=136_000,
            memory_gb_per_s=18.5,
        ),
        "expected_acceptance": ExpectedAcceptance(
            before=_acceptance(0.27),
            after=_acceptance(0.44),
            after_by_category={"chat": _acceptance(0.41), "code": _acceptance(0.52)},
            after_by_temperature={"0.0": _acceptance(0.47)},
        ),
        "results": results,
        "with_lookup": [tiny_result(gamma=4, speedup=1.5)],
        "best": best,
        "verdict": "1.31x as fast as the target alone, greedy, drafting 2 at a time.",
        "warnings": [],
        "samples": [],
        "seconds_by_stage": {"distill": 431.0, "evaluate": 95.0},
        "peak_memory_gib": 3.4,
        "training_curve": [{"step": 0, "tokens": 0, "expected_acceptance": 0.26, "loss": 3.1}],
    }
    return Report(**{**values, **changes})


def write_tiny_run(
    folder: Path, *, draft: Draft | None = None, report: Report | None = None, seed: int = 0
) -> Run:
    """A run folder as the stages leave it: draft/model, report, a plot, every manifest."""
    run = Run(folder=folder, store=folder / ".store", seed=7, name=folder.name)
    tiny_model(num_layers=2, seed=seed).save_pretrained(run.draft / "model")
    tiny_tokenizer().save_pretrained(run.draft / "model")
    tiny_corpus().write(run.corpus)
    tiny_lessons().write(run.lessons)
    (draft or tiny_draft()).write(run.draft)
    (report or tiny_report()).write(run.report)
    write_atomically(run.report / "report.json", (run.report / "manifest.json").read_bytes())
    write_atomically(run.report / "speedup.png", b"\x89PNG\r\n\x1a\n not a real picture")
    return run
