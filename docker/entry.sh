#!/bin/sh
# What `docker run IMAGE` starts: one of the project's commands, in place of this shell, so that a signal reaches it.
set -eu

usage() {
    cat <<'TEXT'
One agent, many worlds: multi-task reinforcement learning on DMLab-30, Atari-57 and your own suites.

docker run IMAGE COMMAND ...
  train      train on a suite:            train --suite dmlab30
  actors     join a run elsewhere:        actors --connect tcp://HOST:5555 --keys /data/keys
  score      score a run or its returns:  score runs/dmlab30-...
  doctor     check machine and suite:     doctor --suite dmlab30
  benchmark  speed of each stage:         benchmark --suite dmlab30
COMMAND --help tells more.

Runs are written to /data/runs, DeepMind Lab's maps to /data/cache: mount a volume on each. A run needs shared memory
(--shm-size=8g; it says beforehand how much) and, for GPUs, --gpus all. `docker stop -t 150` writes a checkpoint; continue
with train --resume runs/NAME.
TEXT
}

home=$(dirname "$0")/..
case "${1:-help}" in
    train) script=launch/multitask.py ;;
    actors) script=launch/actors.py ;;
    score) script=eval/score.py ;;
    doctor) script=launch/doctor.py ;;
    benchmark) script=launch/benchmark.py ;;
    help | -h | --help)
        usage
        exit 0
        ;;
    *)
        echo "docker run: $1 is no command: use train, actors, score, doctor or benchmark" >&2
        exit 2
        ;;
esac
shift
exec python "$home/$script" "$@"
