# The image: DeepMind Lab, torch and this project. README.md, section "Docker", has the build and run lines and says
# which stage has been built where.
#
#   dmlab         builds the deepmind_lab wheel from its own sources (skipped when DMLAB_WHEEL names a wheel)
#   dmlab-given   takes the wheel DMLAB_WHEEL instead
#   venv          Python packages; left behind, so that neither pip's files nor the wheel weigh on the image
#   runtime       what is run
#   test          runtime plus the tests; its build runs them
#
# No heredocs and no COPY --link: Debian 12's buildah builds this file, too.

ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
# A wheel within the build context; empty = build it.
ARG DMLAB_WHEEL=

# --- the engine from its sources: not yet built by the authors, who had no network to its sources ---------------------
FROM ${PYTHON_IMAGE} AS dmlab
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Packages of upstream's docs/users/build.md for Debian, without its Python: the extension must fit the image's own.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    build-essential ca-certificates curl freeglut3-dev gettext git libffi-dev libgl1-mesa-dev libglu1-mesa-dev \
    libosmesa6-dev libsdl2-dev pkg-config unzip zip zlib1g-dev \
 && rm -rf /var/lib/apt/lists/*

# Bazel 8 is the last that reads a WORKSPACE file, which upstream still has.
ARG BAZEL_VERSION=8.2.1
ARG BAZEL_SHA256=7ff2b6a675b59a791d007c526977d5262ade8fa52efc8e0d1ff9e18859909fc0
RUN curl -fsSL --retry 3 -o /usr/local/bin/bazel \
    "https://github.com/bazelbuild/bazel/releases/download/${BAZEL_VERSION}/bazel-${BAZEL_VERSION}-linux-x86_64" \
 && echo "${BAZEL_SHA256}  /usr/local/bin/bazel" | sha256sum -c - \
 && chmod +x /usr/local/bin/bazel

# NumPy of the image's own version: the extension runs only on the major version whose headers it was built with.
COPY docker/requirements.txt /pins/
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir -c /pins/requirements.txt numpy setuptools wheel

# A commit is its own checksum. This one is the last that changed upstream's WORKSPACE.
ARG LAB_COMMIT=6dd241d1b17a1f4e67819b922ecc05bedc4efcbb
WORKDIR /lab
RUN git init -q \
 && git fetch -q --depth 1 https://github.com/google-deepmind/lab.git "${LAB_COMMIT}" \
 && git checkout -q FETCH_HEAD

# Upstream's archives follow branches and its rules name Python 2: pin the first, drop the second.
COPY docker/pin_dmlab.py /pins/
COPY docker/python_system.bzl /lab/python_system.bzl
RUN python3 /pins/pin_dmlab.py /lab

# Bazel 8 names the folder of runfiles _main; upstream's packaging script looks for the workspace's name.
# The wheel calls itself py3-none-any and holds native code: the tags say what it fits, so that pip refuses another Python.
ENV PYTHON_BIN_PATH=/opt/build/bin/python
RUN bazel build -c opt --enable_workspace --cxxopt=-std=c++17 --host_cxxopt=-std=c++17 \
    --repo_env=PYTHON_BIN_PATH=${PYTHON_BIN_PATH} --verbose_failures //python/pip_package:build_pip_package \
 && ln -sfn _main bazel-bin/python/pip_package/build_pip_package.runfiles/org_deepmind_lab \
 && ./bazel-bin/python/pip_package/build_pip_package /built \
 && /opt/build/bin/wheel tags --remove --python-tag cp311 --abi-tag cp311 --platform-tag linux_x86_64 /built/*.whl \
 && mkdir /wheel && mv /built/*.whl /wheel/ \
 && bazel clean --expunge

# --- or a wheel that is there already ---------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS dmlab-given
ARG DMLAB_WHEEL
# The default is only for builders that run stages nobody asked for.
COPY ${DMLAB_WHEEL:-setup.py} /wheel/

# hadolint ignore=DL3006
FROM dmlab${DMLAB_WHEEL:+-given} AS wheel

# --- Python packages --------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS venv
# cpu, or a CUDA version that torch is published for: cu126, cu128, ...
ARG TORCH=cpu
ARG TORCH_VERSION=2.13.0
ENV PATH=/opt/venv/bin:${PATH}
COPY docker/requirements.txt /pins/
# The exact label: on the package index plain torch is a CUDA build. setuptools below 81 has pkg_resources, which the
# deepmind_lab wheel imports, and Python 3.11 is the last with the `imp` that it imports, too.
RUN python3 -m venv /opt/venv \
 && pip install --no-cache-dir -c /pins/requirements.txt --extra-index-url "https://download.pytorch.org/whl/${TORCH}" \
    "torch==${TORCH_VERSION}+${TORCH}" \
 && pip install --no-cache-dir -r /pins/requirements.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir -c /pins/requirements.txt /wheel/*.whl \
 && pip check

# --- what is run ------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
# OSMesa and EGL draw the levels, SDL is linked by the engine, zip packs its maps, tini is process 1.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    libegl1 libgl1 libgl1-mesa-dri libglu1-mesa libosmesa6 libsdl2-2.0-0 tini zip \
 && rm -rf /var/lib/apt/lists/*
COPY --from=venv /opt/venv /opt/venv
COPY agent /opt/multitask/agent
COPY eval /opt/multitask/eval
COPY launch /opt/multitask/launch
COPY tasks /opt/multitask/tasks
COPY docker /opt/multitask/docker
COPY setup.py pyproject.toml README.md /opt/multitask/
# Graphics for `renderer: hardware` (EGL), where the NVIDIA runtime mounts its driver.
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics \
    XDG_CACHE_HOME=/data/cache \
    HOME=/data
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e /opt/multitask \
 && python -m compileall -q /opt/multitask \
 && useradd --uid 1000 --no-create-home --home-dir /data --shell /usr/sbin/nologin multitask \
 && mkdir -p /data/runs /data/cache \
 && chown -R multitask:multitask /data
USER 1000:1000
# Runs are written to /data/runs, maps once built to /data/cache.
WORKDIR /data
# The build ends here when the engine does not import, or cannot reset and play one level.
RUN python /opt/multitask/docker/check_engine.py
VOLUME ["/data/runs", "/data/cache"]
HEALTHCHECK --interval=60s --timeout=20s --start-period=10m --retries=3 \
    CMD ["python", "/opt/multitask/docker/healthcheck.py"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/multitask/docker/entry.sh"]

# --- the tests, against the module of this image ----------------------------------------------------------------------
FROM runtime AS test
USER 0:0
WORKDIR /opt/multitask
COPY . .
RUN pip install --no-cache-dir --no-build-isolation -c docker/requirements.txt -e '.[dev]' \
 && chown -R multitask:multitask /opt/multitask
USER 1000:1000
ARG TESTS=tests
# Several files or flags are allowed, so no quotes.
# hadolint ignore=SC2086
RUN python -m pytest ${TESTS}
