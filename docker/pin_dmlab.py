"""Makes a checkout of google-deepmind/lab buildable in the same way tomorrow: archives pinned, Python 2 gone.

Upstream's WORKSPACE takes several archives from the head of a branch, which has moved on; zlib's first address is gone.
Archives that only its tests and examples need are removed, so that nothing without a checksum can come in.

  python pin_dmlab.py CHECKOUT
"""

import re
import sys
from pathlib import Path

GITHUB = "https://github.com/"
MIRROR = "https://mirror.bazel.build/"
# name -> (folder in the archive, sha256, addresses)
PINS = {
    "bazel_skylib": (
        "",
        "bc283cdfcd526a52c3201279cda4bc298652efa898b10b4db0837dc51652756f",
        [f"{host}bazelbuild/bazel-skylib/releases/download/1.7.1/bazel-skylib-1.7.1.tar.gz"
         for host in (f"{MIRROR}github.com/", GITHUB)],
    ),
    "com_google_absl": (
        "abseil-cpp-20240116.2",
        "733726b8c3a6d39a4120d7e45ea8b41a434cdacde401cba500f14236c49b39dc",
        [f"{GITHUB}abseil/abseil-cpp/archive/refs/tags/20240116.2.tar.gz"],
    ),
    "zlib_archive": (
        "zlib-1.2.11",
        "c3e5e9fdd5004dcb542feda5ee4f0ff0744628baf8ed2dd5d66f8ca1197cb1a1",
        [f"{MIRROR}zlib.net/zlib-1.2.11.tar.gz", "https://zlib.net/fossils/zlib-1.2.11.tar.gz"],
    ),
}  # fmt: skip
# Only upstream's tests and Python examples ask for these, and the wheel needs neither.
UNUSED = (
    "com_google_googletest", "com_google_absl_py", "enum34_archive", "funcsigs_archive", "dm_env_archive", "tree_archive",
    "pybind11_archive",
)  # fmt: skip
RULE = re.compile(r'^http_archive\(\n    name = "(?P<name>\w+)",\n(?P<body>.*?)^\)\n', re.DOTALL | re.MULTILINE)
BUILD_FILE = re.compile(r"^    build_file = .*\n", re.MULTILINE)
PYTHON_2_AND_3 = re.compile(r'\[\s*"PY2",\s*"PY3",\s*\]')


def pin_workspace(text: str) -> str:
    """The text of a WORKSPACE with each archive pinned.

    Raises:
        ValueError: an archive has no checksum, or one that is to be pinned is not there: another commit than was expected.
    """
    names = [match["name"] for match in RULE.finditer(text)]
    if missing := sorted(set(PINS) - set(names)):
        raise ValueError(f"WORKSPACE has no {', '.join(missing)}: LAB_COMMIT is not the commit these pins were made for")
    text = RULE.sub(_pinned, text)
    for match in RULE.finditer(text):
        if "sha256 = " not in match["body"]:
            raise ValueError(f"WORKSPACE: {match['name']} has no checksum: pin it in pin_dmlab.py")
    return text


def _pinned(match: re.Match[str]) -> str:
    name = match["name"]
    if name in UNUSED:
        return ""
    if name not in PINS:
        return match[0]
    folder, sha256, urls = PINS[name]
    build_file = "".join(BUILD_FILE.findall(match["body"]))
    strip = f'    strip_prefix = "{folder}",\n' if folder else ""
    lines = "".join(f'        "{url}",\n' for url in urls)
    return f'http_archive(\n    name = "{name}",\n{build_file}    sha256 = "{sha256}",\n{strip}    urls = [\n{lines}    ],\n)\n'


def without_python_2(text: str) -> str:
    """The text of the root BUILD file without its Python 2 targets, which Bazel 8 refuses."""
    return PYTHON_2_AND_3.sub('["PY3"]', text)


def main() -> int:
    """Rewrite WORKSPACE and BUILD of the checkout."""
    checkout = Path(sys.argv[1])
    try:
        for name, change in (("WORKSPACE", pin_workspace), ("BUILD", without_python_2)):
            path = checkout / name
            path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"pin_dmlab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
