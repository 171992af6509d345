"""`python -m eval`: talk to a finished pair, or collect the figures of this project.

Measuring a draft is a stage of the pipeline: `python -m train stage=evaluate`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.console import settle_libraries
from conf.contracts import MANIFEST
from conf.errors import UserError

EXAMPLES = """\
examples:
  python -m eval chat                        talk to the pair of outputs/main (else outputs/smoke)
  python -m eval chat --run smoke --gamma 3  of another run, drafting 3 tokens at a time
  python -m eval chat --once "Why is the sky blue?"
  python -m eval bench                       write outputs/bench/bench.json, show it as a table
  python -m eval bench --only e2e            what the last run reached, without measuring again

Measuring a draft is a stage of the pipeline: python -m train stage=evaluate
"""


def some_text(text: str) -> str:
    """An argument that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty and would end every answer: leave it out")
    return text


def number(read: Callable[[str], float], least: float) -> Callable[[str], float]:
    """An argument that is a finite number of `least` or more."""

    def parse(text: str) -> float:
        try:
            value = read(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            kind = "a whole number" if read is int else "a finite number"
            raise argparse.ArgumentTypeError(f"{text}: use {kind} of {least:g} or more")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """Every option, with its default."""
    whole = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m eval",
        description="Talk to a target through its draft, or collect the figures of this project.",
        epilog=EXAMPLES,
        formatter_class=whole,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="{chat,bench}")
    chat = commands.add_parser(
        "chat",
        help="a terminal chat that shows which tokens the draft wrote",
        description="A chat in the terminal. Accepted draft tokens, corrections and bonus tokens "
        "have different colours; acceptance and speed are shown after each answer. Answers follow "
        "the target's own distribution, whatever the draft proposes.",
    )
    bench = commands.add_parser(
        "bench",
        help="every figure this project promises, as a file and a table",
        description="Write OUTPUTS/bench/bench.json and show its rows. The exit code is 1 when a "
        "benchmark failed.",
    )
    for command, default in ((chat, "main if it has a draft, else smoke"), (bench, "main")):
        command.add_argument(
            "--run", metavar="NAME", help=f"run below OUTPUTS (default: {default})"
        )
        command.add_argument(
            "--outputs", type=Path, default=Path("outputs"), help="folder of the runs (%(default)s)"
        )
    bench.add_argument(
        "--only",
        nargs="+",
        choices=("e2e", "prepare", "distill", "decode", "generate", "codec"),
        help="these groups of figures (default: all)",
    )
    chat.add_argument("--once", metavar="PROMPT", help="answer this and leave")
    chat.add_argument(
        "--temperature", type=number(float, 0), default=0.7, help="0 is greedy (%(default)s)"
    )
    chat.add_argument(
        "--repetition-penalty",
        type=number(float, 0.01),
        default=1.0,
        help="above 1, tokens that were there before are less likely (%(default)s)",
    )
    chat.add_argument(
        "--stop",
        metavar="STRING",
        action="append",
        type=some_text,
        default=[],
        help="ends an answer; may be given several times",
    )
    chat.add_argument(
        "--gamma",
        type=number(int, 0),
        help="drafted tokens for each target call; 0 is the target alone (default: the best of the "
        "run's report, else 2)",
    )
    chat.add_argument(
        "--lookup",
        type=number(int, 0),
        default=4,
        help="tokens that prompt lookup drafts where the text repeats itself, 0 for none "
        "(%(default)s)",
    )
    chat.add_argument(
        "--max-new-tokens", type=number(int, 1), default=256, help="of an answer (%(default)s)"
    )
    chat.add_argument(
        "--context", type=number(int, 2), default=2048, help="tokens remembered (%(default)s)"
    )
    chat.add_argument("--seed", type=number(int, 0), default=0, help="(%(default)s)")
    chat.add_argument("--no-compile", action="store_true", help="start sooner, decode slower")
    return top


def chat_command(options: argparse.Namespace) -> int:
    """`python -m eval chat`."""
    from eval.chat import ChatSettings, read_report, run_chat

    folder = chosen_run(options.outputs, options.run)
    report = read_report(folder)
    gamma, by_cost = options.gamma, False
    if gamma is None:
        gamma, by_cost = (2, False) if report is None else (report.best.gamma, report.best.by_cost)
    settings = ChatSettings(
        gamma=gamma,
        by_cost=by_cost,
        lookup=options.lookup,
        temperature=options.temperature,
        repetition_penalty=options.repetition_penalty,
        stop=tuple(options.stop),
        max_new_tokens=options.max_new_tokens,
        context=options.context,
        seed=options.seed,
        compiled=not options.no_compile,
    )
    run_chat(folder, settings, options.once)
    return 0


def chosen_run(outputs: Path, name: str | None) -> Path:
    """The run that is asked for, else the first of main and smoke that has a draft.

    Raises UserError, saying which command makes a draft, when there is none.
    """
    names = [name] if name else ["main", "smoke"]
    for folder in (outputs / each for each in names):
        if (folder / "draft" / MANIFEST).is_file():
            return folder
    places = " or ".join(str(outputs / each) for each in names)
    raise UserError(
        f"there is no draft in {places} yet: `make smoke` makes a small one in about 3 minutes, "
        "`make distill` a real one, and --run names another run."
    )


def bench_command(options: argparse.Namespace) -> int:
    """`python -m eval bench`."""
    from eval.bench import BENCHMARKS, bench, distill
    from eval.bench_codec import codec
    from eval.bench_decode import decode
    from eval.bench_generate import generate
    from eval.bench_prepare import prepare

    known = {
        **BENCHMARKS,
        "prepare": prepare,
        "distill": distill,
        "decode": decode,
        "generate": generate,
        "codec": codec,
    }
    chosen = {name: known[name] for name in options.only or known}
    rows = bench(options.outputs / (options.run or "main"), options.outputs, benchmarks=chosen)
    return int(any(row.error for row in rows))


COMMANDS = {"chat": chat_command, "bench": bench_command}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 when a benchmark failed, 2 with one sentence for bad input."""
    options = parser().parse_args(arguments)
    settle_libraries()
    try:
        return COMMANDS[options.command](options)
    except UserError as wrong:
        sys.stderr.write(f"error: {wrong}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
