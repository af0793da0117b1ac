"""What is printed may be lost; a run may not."""

import os
import subprocess
import sys
from pathlib import Path

import runs

# Prints a lot, then says on a channel of its own that it came to its end. Threads that hang must not hold it up.
TALKER = """
import os
import sys
from pathlib import Path
from launch import screen
screen.keep_descriptors()
open_file = open(sys.argv[1] + ".other", "w")
if sys.stdout is None:
    for descriptor in range(3):
        os.write(descriptor, b"as a library does")
with screen.guarded():
    screen.log_to(Path(sys.argv[1]))
    for number in range(20000):
        print("line", number, flush=True)
        print("error", number, file=sys.stderr, flush=True)
Path(sys.argv[1] + ".end").touch()
"""


def talk(log: Path, **streams: object) -> subprocess.Popen[bytes]:
    """The talker; it has to end whatever its output is."""
    return subprocess.Popen([sys.executable, "-c", TALKER, str(log)], cwd=runs.ROOT, **streams)  # type: ignore[call-overload]


def ended_well(process: subprocess.Popen[bytes], log: Path) -> str:
    """What it noted."""
    assert process.wait(60) == 0
    assert Path(f"{log}.end").exists()
    assert Path(f"{log}.other").read_text() == "", "a file that was opened later became an output"
    return log.read_text() if log.exists() else ""


def test_a_closed_pipe(tmp_path):
    read, write = os.pipe()
    os.close(read)
    process = talk(tmp_path / "log", stdout=write, stderr=write)
    assert ended_well(process, tmp_path / "log").count("Broken pipe") == 1


def test_a_pipe_that_nobody_reads(tmp_path):
    read, write = os.pipe()
    process = talk(tmp_path / "log", stdout=write, stderr=write)
    assert "nobody reads" in ended_well(process, tmp_path / "log")
    os.close(write)
    os.close(read)


def test_a_full_device(tmp_path):
    with Path("/dev/full").open("wb") as full:
        process = talk(tmp_path / "log", stdout=full, stderr=subprocess.DEVNULL)
        assert "No space left" in ended_well(process, tmp_path / "log")


def test_closed_descriptors(tmp_path):
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", TALKER, str(tmp_path / "log")]
    assert ended_well(subprocess.Popen(command, cwd=runs.ROOT), tmp_path / "log") == ""


def test_what_is_read_is_whole_and_in_order(tmp_path):
    code = """
import sys
from launch import screen
with screen.guarded():
    for number in range(300):
        print(number, file=sys.stderr if number % 3 else sys.stdout)
    print("Universit\u00e4t")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=runs.ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert done.stdout.decode("ascii").split() == [*map(str, range(300)), "Universit\\xe4t"]


def test_a_log_on_a_full_disk_ends_no_role():
    code = """
import sys
from pathlib import Path
from launch import screen
screen.guard_logs()
print("something to say", flush=True)
sys.exit(7)
"""
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, cwd=runs.ROOT, timeout=60).returncode == 7
