"""Bazel's view of the Python that the extension is built for: the headers of PYTHON_BIN_PATH and of its NumPy."""

_HEADERS = "import sysconfig, numpy; print(sysconfig.get_path('include')); print(numpy.get_include())"

_BUILD = """
cc_library(
    name = "python_headers",
    hdrs = glob(["python3/**/*.h", "numpy3/**/*.h"]),
    includes = ["python3", "numpy3"],
    visibility = ["//visibility:public"],
)
"""

def _python_repo_impl(repository_ctx):
    python = repository_ctx.getenv("PYTHON_BIN_PATH")
    if not python:
        fail("PYTHON_BIN_PATH is not set: name the Python that the wheel is for")
    result = repository_ctx.execute([python, "-c", _HEADERS])
    if result.return_code:
        fail("{} gives no headers: {}".format(python, result.stderr))
    include, numpy_include = result.stdout.splitlines()
    repository_ctx.symlink(include, "python3")
    repository_ctx.symlink(numpy_include, "numpy3")
    repository_ctx.file("BUILD", _BUILD)

python_repo = repository_rule(
    implementation = _python_repo_impl,
    configure = True,
    local = True,
    attrs = {"py_version": attr.string(default = "PY3", values = ["PY3"])},
)
