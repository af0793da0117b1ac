"""Tries an image under podman with its real entry point: commands, docker stop, resume, health, zombies. By hand.

python tests/docker/run_here.py IMAGE
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Debian 12's crun fails in a sandbox without systemd; runc does not. The limits are below what such a sandbox allows.
RUN = ["podman", "run", "--runtime", "runc", "--network", "host", "--shm-size", "1g",
       "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096"]  # fmt: skip
INSIDE = (Path(__file__).parent / "inside.py").read_text(encoding="utf-8")
NAME, RUNS, CACHE = "multitask-try", "multitask-try-runs", "multitask-try-cache"
KILLS = 50
SMALL = ["actor.num_actors=2", "actor.num_envs=2", "actor.unroll_length=10", "learner.batch_size=2", "network.torso=shallow"]


def podman(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """One podman command to its end."""
    return subprocess.run(["podman", *arguments], input=given, capture_output=True, text=True, timeout=600)


def once(image: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The image run to its end."""
    command = [*RUN, "--rm", "--no-healthcheck", *options, image, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def check(what: str, good: bool, detail: object = "") -> None:
    """One line of the result; the first that fails ends it."""
    print(f"{'ok  ' if good else 'FAIL'} {what} {detail}", flush=True)
    assert good, what


def wait_for(what: Callable[[], object], seconds: float = 240) -> object:
    """What `what` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain: " + podman("logs", NAME).stdout[-2000:]
        time.sleep(0.5)
    return found


def folder(volume: str) -> Path:
    """Where a volume lies on this machine."""
    return Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", volume).stdout.strip())


def updates(run_dir: Path) -> int:
    """Of the newest record, 0 before the first."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[-1])["updates"] if lines else 0


def try_commands(image: str) -> None:
    """What needs no run."""
    done = once(image)
    check("without arguments it says what it can do", done.returncode == 0 and "train --suite dmlab30" in done.stdout)
    done = once(image, "trian")
    check("an unknown command is refused", done.returncode == 2 and "use train" in done.stderr)
    for command in ("train", "score", "benchmark", "doctor"):
        done = once(image, command, "--help")
        check(f"{command} --help", done.returncode == 0, done.stderr.strip()[-200:] if done.returncode else "")
    done = once(image, "-u", options=("--entrypoint", "id"))
    check("not root", done.stdout.strip() == "1000")
    done = once(image, "train", "--suite", "toy", "actor.num_actors=64", options=("--shm-size", "1m"))
    check("too little shared memory names the flag", done.returncode == 2 and "--shm-size" in done.stderr)
    done = once(image, "train", "--suite", "toy", "--total-frames", "3000")
    check("a short run ends by itself", done.returncode == 0 and "done:" in done.stdout, done.stderr[-300:])


def stop(what: str) -> None:
    """`docker stop`: SIGTERM, one checkpoint, exit code 143."""
    began = time.monotonic()
    podman("stop", "-t", "60", NAME)
    code = podman("inspect", "--format", "{{.State.ExitCode}}", NAME).stdout.strip()
    logs = podman("logs", NAME)
    check(f"stop ends {what} with 143", code == "143", f"after {time.monotonic() - began:.1f} s")
    check("it says how to go on", "continue with" in logs.stdout + logs.stderr)
    podman("rm", NAME)


def train(image: str, *arguments: str) -> None:
    """A training run in the background, with a volume for runs."""
    command = [*RUN, "-d", "--name", NAME, "-v", f"{RUNS}:/data/runs", image, "train", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def try_run(image: str) -> None:
    """A run that loses actors, is stopped, continued and scored."""
    run_dir = folder(RUNS) / "try"
    train(image, "--suite", "toy", "--run-dir", "runs/try", "--total-frames", "1e9", "actor.num_actors=4", "actor.num_envs=8",
          "learner.batch_size=8", "log.every_seconds=1", "supervisor.backoff_seconds=0",
          "supervisor.max_start_failures=1000", "supervisor.sound_seconds=0")  # fmt: skip
    wait_for(lambda: updates(run_dir))
    health = podman("healthcheck", "run", NAME)
    check(
        "healthy", health.returncode == 0, podman("exec", NAME, "python", "/opt/multitask/docker/healthcheck.py").stdout.strip()
    )
    done = podman("exec", "-i", NAME, "python", "-", "/data/runs/try", str(KILLS), given=INSIDE)
    check("actors were killed", done.returncode == 0, done.stderr[-300:])
    found = json.loads(done.stdout)
    check("no zombie is left", found["zombies"] == 0 and found["first"].endswith("tini"), found)
    restarts = sum("restart" == json.loads(line)["event"] for line in (run_dir / "restarts.jsonl").open(encoding="utf-8"))
    check("each was restarted", restarts >= KILLS, restarts)
    before = updates(run_dir)
    wait_for(lambda: updates(run_dir) > before + 3)
    check("the run lives on", True, f"{before} -> {updates(run_dir)} updates")
    stop("a run")
    files = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    check("a checkpoint is there", len(files) > 1, files)
    before = updates(run_dir)
    train(image, "--resume", "runs/try")
    wait_for(lambda: updates(run_dir) > before)
    check("a new container continues", True, f"{before} -> {updates(run_dir)} updates")
    stop("the continued run")
    done = once(image, "score", "runs/try", options=("-v", f"{RUNS}:/data/runs"))
    check("score reads the run", done.returncode == 0, done.stderr[-300:])


def try_dmlab(image: str) -> None:
    """DeepMind Lab's suite with the engine in the image; maps outlive the container in their volume."""
    cache = ("-v", f"{CACHE}:/data/cache")
    tasks = ("--suite", "dmlab30", "--tasks", "lasertag_one_opponent_small,explore_goal_locations_small")
    done = once(image, "doctor", *tasks, *SMALL, options=cache)
    check("doctor finds nothing amiss", done.returncode == 0, done.stdout[-1500:] if done.returncode else "")
    done = once(image, "train", *tasks, *SMALL, "--total-frames", "4000", options=cache)
    check("dmlab30 trains", done.returncode == 0 and "done:" in done.stdout, (done.stdout + done.stderr)[-600:])
    maps = [path for path in folder(CACHE).rglob("*") if path.is_file()]
    check("the cache volume holds maps", len(maps) > 0, f"{len(maps)}, such as {maps[0].relative_to(folder(CACHE))}")


def try_control(image: str) -> None:
    """The same orphans without an init: they stay, so the count above means something."""
    command = [*RUN, "-d", "--name", NAME, "--entrypoint", "python", image, "-c", "import time; time.sleep(600)"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(podman("exec", "-i", NAME, "python", "-", "-", "0", given=INSIDE).stdout)
    check("control: without init, orphans stay", found["zombies"] > 0, found)
    podman("rm", "-f", "-t", "0", NAME)


def clean() -> None:
    """Remove what an earlier try left behind."""
    podman("rm", "-f", NAME)
    podman("volume", "rm", "-f", RUNS, CACHE)


def main() -> None:
    """All of it; leaves nothing behind."""
    image = sys.argv[1]
    clean()
    for name in (RUNS, CACHE):
        podman("volume", "create", name)
    try:
        try_commands(image)
        try_run(image)
        try_dmlab(image)
        try_control(image)
    finally:
        clean()
    print("all of it holds")


main()
