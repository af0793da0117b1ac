"""The command that scores runs, files of returns or published agents: per task, over tasks, and against a baseline."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from eval import compare, tables
from eval.identity import differences, remarks
from eval.report import Report, make_report
from eval.sides import Side
from eval.sources import baseline_side, subject_side
from eval.write import write
from launch import screen


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0; 1 where a task has no episode; 2 where something given is wrong; 130 on Ctrl-C."""
    args = parse(arguments)
    try:
        check_flags(args)
        result = build(args)
        # First: a reader of the terminal's text may close the pipe (`| head`).
        written = [] if args.out is None else write(result, args.out)
        tables.show(result, tables.make_console(sys.stdout.isatty()))
        if written:
            print(f"written: {', '.join(map(str, written))}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: there is no report; finished games are kept", file=sys.stderr)
        return 130
    return 1 if result.missing and not args.allow_missing else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python eval/score.py", description="Score runs, files of returns or published agents; compare with a baseline."
    )
    parser.add_argument("source", type=Path, nargs="*", metavar="RUN|RETURNS.json",
                        help="run folder, several = seeds of one experiment; or {level: [returns]}")  # fmt: skip
    parser.add_argument("--published", metavar="NAME", help="score a published agent instead")
    parser.add_argument("--baseline", nargs="+", metavar="B", help="runs, single-task runs, returns file, checkpoint or NAME")
    parser.add_argument("--last", type=positive, metavar="N", help="training episodes per task (default 100)")
    parser.add_argument("--episodes", type=positive, metavar="N", help="play N whole games per task instead")
    parser.add_argument("--num-envs", type=positive, metavar="K", help="games at the same time (default 4)")
    parser.add_argument("--split", choices=("train", "test"), help="levels to play (default test)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="parameters to play with (default the newest)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the games played (default 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the network that plays (default cpu)")
    parser.add_argument("--suite", help="of RETURNS.json or --published: a name or a YAML file")
    parser.add_argument("--score-table", default="", metavar="T", help="random and human scores (default the suite's)")
    parser.add_argument("--margin", type=points, metavar="P", help="points that a task may lose (default 5)")
    parser.add_argument("--trust", action="store_true", help="run the environments' code that the run's folder names")
    parser.add_argument("--allow-missing", action="store_true", help="aggregate although tasks have no episode")
    parser.add_argument("--force", action="store_true", help="compare what does not mean the same; the report says so")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.json, .csv, .md and .html there")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def points(text: str) -> float:
    """A finite number of at least 0, for argparse."""
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError
    return number


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a source that does not exist and for a flag that would be ignored."""
    if not args.source and args.published is None:
        hint = "; write it before --baseline, which takes all words after it" if args.baseline else ""
        raise ValueError(f"nothing to score: name a run folder, a file of returns or --published NAME{hint}.")
    if args.source and args.published is not None:
        raise ValueError(f"{args.source[0]} and --published {args.published} are two sources: name one of them.")
    for source in args.source:
        if not source.exists():
            raise ValueError(f"{source} does not exist; give a run folder or a JSON file of {{level: [returns]}}.")
    if len(args.source) > 1 and any(source.is_file() for source in args.source):
        raise ValueError(f"{next(s for s in args.source if s.is_file())} is a file; several sources must all be run folders.")
    if len(args.source) > 1 and args.checkpoint is not None:
        raise ValueError(f"--checkpoint {args.checkpoint} is of one run, but {len(args.source)} are named.")
    _check_ignored(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda cannot be used: torch finds no GPU; leave the flag out to play on the CPU.")


def _check_ignored(args: argparse.Namespace) -> None:
    source = f"--published {args.published}" if args.published is not None else args.source[0]
    is_folder = args.published is None and args.source[0].is_dir()
    ignored: tuple[str, ...]
    if not is_folder:
        reason, ignored = "it belongs to a run folder", ("last", "episodes", "num_envs", "checkpoint", "seed", "device")
        if args.published is not None:
            ignored = (*ignored, "split")
    elif args.episodes is None:
        reason = "it needs --episodes: training episodes are scored"
        ignored = ("num_envs", "split", "checkpoint", "seed", "device")
    else:
        reason, ignored = "games are played, not training episodes scored", ("last",)
    for name in ignored:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not apply to {source}: {reason}.")
    if is_folder and args.suite is not None:
        raise ValueError(f"--suite does not apply to {source}: a run says its suite; leave the flag out.")
    if args.published is None and args.source[0].is_file() and args.suite is None:
        raise ValueError(f"{source} does not say its suite; add --suite NAME or --suite FILE.yaml.")
    if args.margin is not None and not args.baseline:
        raise ValueError(f"--margin {args.margin:g} does not apply to {source}: there is no --baseline.")
    if args.force and not args.baseline and len(args.source) < 2:
        raise ValueError(f"--force does not apply to {source}: there is no --baseline.")


def build(args: argparse.Namespace) -> Report:
    """The report that the command line asks for."""
    side = subject_side(args)
    if not args.baseline:
        return make_report(side, allow_missing=args.allow_missing)
    baseline = baseline_side(args, side)
    check_parameters(side, baseline)
    found = check_comparable(side, baseline, args.force)
    margin = compare.MARGIN_PERCENT if args.margin is None else args.margin
    return make_report(
        side, baseline, args.allow_missing, margin, tuple(found), tuple(remarks(side.identity, baseline.identity))
    )


def check_parameters(side: Side, baseline: Side) -> None:
    """Raise ValueError where the same parameters played on both sides, as with a copied run: they differ by nothing."""
    ours, theirs = (
        {entry["parameter_hash"]: entry["checkpoint"] for entry in one.identity.runs if entry.get("parameter_hash")}
        for one in (side, baseline)
    )
    for same in sorted(ours.keys() & theirs.keys()):
        raise ValueError(f"{ours[same]} and {theirs[same]} hold the same parameters: give --baseline another checkpoint.")


def check_comparable(side: Side, baseline: Side, force: bool) -> list[str]:
    """What differs in meaning between two sides. Raises ValueError naming it, unless `force`."""
    found = differences(side.identity, baseline.identity, side.suite, baseline.own_suite)
    if found and not force:
        hint = " --score-table T scores raw returns of both sides anew." if found[0].startswith("score table") else ""
        raise ValueError(f"the two sides do not mean the same: {'; '.join(found)}.{hint} --force compares them anyway.")
    return found


if __name__ == "__main__":
    screen.show_any_letter()
    sys.exit(main())
