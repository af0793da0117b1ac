#!/usr/bin/env bash
# Builds the image's stages runtime and test without a Docker engine, and tries the image. By hand, as root, on Debian 12:
#
#   apt-get install --no-install-recommends buildah podman runc mmdebstrap
#   tests/docker/build_here.sh [WHEEL]     default: the stand-in's wheel, built from tests/dmlab_standin
#
# Read from the environment:
#   LOGS    folder for logs (default: a new one below the temporary folder)
#   TESTS   what the stage test runs (default: tests)
#   PYTHON  whose `pip config list` says where packages come from (default: python3). Files and folders named there
#           (certificates, constraints, wheels) are mounted while the image is built, and only then.
#   STEPS   of base, runtime, broken, test, run; default all
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
logs=${LOGS:-$(mktemp -d)}
steps=${STEPS:-base runtime broken test run}
base=docker.io/library/python:3.11-slim-bookworm
image=localhost/multitask
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$logs"

wants() { [[ " $steps " == *" $1 "* ]]; }

# The build context: what git knows or would add, and the wheel.
context() {
    mkdir -p "$work/context/wheels"
    (cd "$root" && git ls-files -co --exclude-standard -z | tar -c --null --ignore-failed-read -T -) | tar -x -C "$work/context"
    if [[ -n "${1:-}" ]]; then
        cp "$1" "$work/context/wheels/"
    else
        cp -r "$root/tests/dmlab_standin" "$work/standin"
        "$python" -m pip wheel -q --no-deps -w "$work/context/wheels" "$work/standin"
    fi
    wheel=wheels/$(basename "$work"/context/wheels/*.whl)
}

# pip's configuration here as a file, and a mount for each path in it. No retries: an address that is out of reach here
# (torch's own index, whose wheel lies on the disk) would hold each step up.
mounts() {
    "$python" - "$work/pip.conf" > "$work/mounts" <<'PY'
import ast, pathlib, re, subprocess, sys
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)=(.+)$", listed, re.MULTILINE))
settings = {name: ast.literal_eval(value) for name, value in settings.items()}
lines = [f"{name} = {value}" for name, value in settings.items()]
pathlib.Path(sys.argv[1]).write_text("\n".join(["[global]", *lines, "retries = 0", ""]), encoding="utf-8")
paths = {part.removeprefix("file://").removesuffix("/simple") for value in settings.values() for part in value.split()}
for path in sorted(path for path in paths if path.startswith("/") and pathlib.Path(path).exists()):
    print(f"{path}:{path}:ro")
PY
    options=(-v "$work/pip.conf:/etc/pip.conf:ro")
    while read -r mount; do options+=(-v "$mount"); done < "$work/mounts"
}

# build TARGET TAG WHEEL
build() {
    nice -n 10 buildah --storage-driver overlay build --isolation chroot --pull-never --format docker --layers \
        "${options[@]}" --build-arg DMLAB_WHEEL="$3" --build-arg TESTS="${TESTS:-tests}" --target "$1" -t "$2" "$work/context"
}

# timed NAME COMMAND...: its output to a log, its end and its time to the screen
timed() {
    local name=$1 began=$SECONDS code=0
    shift
    "$@" > "$logs/$name.log" 2>&1 || code=$?
    echo "--- $name: exit code $code after $((SECONDS - began)) s ($logs/$name.log)"
    tail -n "${TAIL:-4}" "$logs/$name.log"
    return "$code"
}

make_base() {
    nice -n 10 mmdebstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/base.tar"
    podman import -q "$work/base.tar" "$base"
}

# A wheel that does not import has to fail the build of runtime, not a user's run.
broken() {
    mkdir -p "$work/broken/deepmind_lab"
    echo 'raise ImportError("numpy.core.multiarray failed to import")' > "$work/broken/deepmind_lab/__init__.py"
    echo 'from setuptools import setup; setup(name="deepmind-lab", version="0", packages=["deepmind_lab"])' > "$work/broken/setup.py"
    "$python" -m pip wheel -q --no-deps -w "$work/context/wheels" "$work/broken"
    if build runtime "$image:broken" "wheels/$(cd "$work/context/wheels" && ls deepmind_lab-0-*.whl)"; then
        echo "the build went through with a wheel that does not import"
        return 1
    fi
    echo "refused, as it should be"
}

context "${1:-}"
mounts
if wants base && ! podman image exists "$base"; then timed base make_base; fi
if wants runtime; then timed runtime build runtime "$image:runtime" "$wheel"; fi
if wants broken; then timed broken broken; fi
if wants test; then timed test build test "$image:test" "$wheel"; fi
podman images --format '{{.Repository}}:{{.Tag}} {{.Size}}'
if wants run; then timed run "$python" "$root/tests/docker/run_here.py" "$image:runtime"; fi
