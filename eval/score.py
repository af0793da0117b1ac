"""The command that scores a run or a file of returns: per task, then over tasks; into the terminal and report.json."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from agent import checkpoint
from eval import report, returns, rollouts
from launch import records
from launch.config import RunFiles, read_run
from tasks.registry import load_suite
from tasks.suite import Suite

LAST_EPISODES = 100
NUM_ENVS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0; 1 where a task has no episode; 2 where something given is wrong; 130 on Ctrl-C."""
    args = parse(arguments)
    try:
        check_flags(args)
        result = score_file(args) if args.source.is_file() else score_run(args)
        report.show(result, report.make_console(sys.stdout.isatty()))
        if args.out is not None:
            print(f"written: {report.write(result, args.out)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: there is no report", file=sys.stderr)
        return 130
    return 1 if result.missing else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python eval/score.py", description="Score a run or a file of returns.")
    parser.add_argument("source", type=Path, metavar="RUN|RETURNS.json", help="run folder, or {level: [returns]}")
    parser.add_argument("--last", type=positive, metavar="N", help="training episodes per task (default 100)")
    parser.add_argument("--episodes", type=positive, metavar="N", help="play N whole games per task instead")
    parser.add_argument("--num-envs", type=positive, metavar="K", help="games at the same time (default 4)")
    parser.add_argument("--split", choices=("train", "test"), help="levels to play (default test)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="parameters to play with (default the newest)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the games played (default 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the network that plays (default cpu)")
    parser.add_argument("--suite", help="of RETURNS.json: a name or a YAML file")
    parser.add_argument("--score-table", default="", metavar="T", help="random and human scores (default the suite's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.json there")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a source that does not exist and for a flag that would be ignored."""
    if not args.source.exists():
        raise ValueError(f"{args.source} does not exist; give a run folder or a JSON file of {{level: [returns]}}.")
    ignored: tuple[str, ...]
    if args.source.is_file():
        reason, ignored = "it belongs to a run folder", ("last", "episodes", "num_envs", "checkpoint", "seed", "device")
    elif args.episodes is None:
        reason = "it needs --episodes: training episodes are scored"
        ignored = ("num_envs", "split", "checkpoint", "seed", "device")
    else:
        reason, ignored = "games are played, not training episodes scored", ("last",)
    for name in ignored:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not apply to {args.source}: {reason}.")
    if args.source.is_dir() and args.suite is not None:
        raise ValueError(f"--suite does not apply to {args.source}: a run says its suite; leave the flag out.")
    if args.source.is_file() and args.suite is None:
        raise ValueError(f"{args.source} does not say its suite; add --suite NAME or --suite FILE.yaml.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda cannot be used: torch finds no GPU; leave the flag out to play on the CPU.")


def score_file(args: argparse.Namespace) -> report.Report:
    """The report of a file of returns: nobody but the user knows how they were made."""
    suite = load_suite(args.suite, score_table=args.score_table)
    found, split = returns.read_returns_file(args.source, suite)
    if args.split not in (None, split or args.split):
        raise ValueError(f"--split {args.split} contradicts {args.source}: it names levels of the {split} split.")
    split = args.split or split or report.UNSTATED
    identity = report.Identity(str(args.source), episodes="all in the file", split=split)
    return report.make_report(suite, found, identity, report.Budget(None, {}, {}))


def score_run(args: argparse.Namespace) -> report.Report:
    """The report of a run folder: of its last training episodes, or of whole games played now."""
    run = read_run(args.source)
    suite = run.suite
    if args.score_table:
        suite = load_suite(run.config.suite, suite.task_names, args.score_table)
    identity = report.Identity(
        str(args.source),
        protocol=run.config.environment.atari_protocol if suite.adapter == "atari" else "-",
        time_limit=run.config.loss.time_limit,
        reward_transform=run.config.loss.reward_transform,
        environment=dataclasses.asdict(run.config.environment),
        frames_per_step=run.frames_per_step,
    )
    if args.episodes is not None:
        return play(args, run, suite, identity)
    last = args.last or LAST_EPISODES
    found = returns.read_episodes(args.source / records.EPISODES, suite, last)
    identity = dataclasses.replace(
        identity,
        policy="sampled, in training: its parameters changed between episodes",
        episodes=f"the last {last} training episodes of each task, or all where there are fewer",
        split="train",
    )
    return report.make_report(suite, found.returns, identity, report.Budget(found.total_frames, found.task_frames, {}))


def play(args: argparse.Namespace, run: RunFiles, suite: Suite, identity: report.Identity) -> report.Report:
    """The report of `--episodes` whole games per task, played with one checkpoint's parameters."""
    file = checkpoint.find(args.checkpoint or args.source)
    content = checkpoint.load(file)
    network, _ = checkpoint.load_network(file, args.device or "cpu")
    network.double()  # see play_games
    torch.set_num_threads(1)  # as an actor: the run may still be training on the other cores
    seed, split = args.seed or 0, args.split or "test"
    task_returns: dict[str, list[float]] = {}
    frames: dict[str, int] = {}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for task in suite.task_names:
            settings, num_envs = run.config.environment, args.num_envs or NUM_ENVS
            games = rollouts.play_games(suite, task, network, settings, range(args.episodes), num_envs, seed, split)
            played = list(progress.track(games, total=args.episodes, description=task))
            played.sort(key=lambda game: game.index)
            task_returns[task] = [game.raw_return for game in played]
            frames[task] = sum(game.frames for game in played)
    identity = dataclasses.replace(
        identity,
        policy="sampled",
        episodes=f"{args.episodes} whole games of each task, seed {seed}",
        split=split,
        seed=seed,
        checkpoint=str(file),
        parameter_hash=checkpoint.parameter_hash(content["parameters"]),
    )
    training_frames = {task: counters["frames"] for task, counters in content["task_counters"].items()}
    budget = report.Budget(content["counters"]["frames"], training_frames, frames)
    return report.make_report(suite, task_returns, identity, budget)


if __name__ == "__main__":
    sys.exit(main())
