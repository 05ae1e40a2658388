"""The machine code of this package: made by a C++ compiler on the machine that runs it, when it is first wanted.

Kept in the user's cache, by what it was made of and for which processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

#: An environment variable; 0: nothing is compiled, and what is compiled is not used.
SWITCH = "FOCUS_HF_NATIVE"

_HERE = Path(__file__).parent
_SOURCES = ("attend.cpp", "route.cpp", "task.h", "parallel.h", "prompt.h", "token.h", "vectors.h")
_NUMBERS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", *_NUMBERS)

#: What not every compiler knows: whose processor it is for, and OpenMP, if its library is there. The first that works.
_OPENMP = ("-fopenmp", "-Wl,-z,defs")
_EXTRAS = (("-march=native", *_OPENMP), ("-mcpu=native", *_OPENMP), ("-mcpu=native",), ("-march=native",), ())

_log = logging.getLogger(__name__)


def library() -> ctypes.CDLL:
    """The library, where nothing is `missing`."""
    found = _find()
    assert isinstance(found, ctypes.CDLL)
    return found


def missing() -> str | None:
    """Why this machine has no library, or ``None``."""
    found = _find()
    return found if isinstance(found, str) else None


@functools.cache
def _find() -> ctypes.CDLL | str:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    compiler = _compiler()
    if os.name != "posix" or not compiler:
        return "there is no C++ compiler (c++, g++ or clang++, or that of pip install ziglang)"
    sources = b"".join((_HERE / name).read_bytes() for name in _SOURCES)
    made_of = hashlib.sha256(repr((compiler, _FLAGS, _EXTRAS, _processor())).encode() + sources).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "focus_hf"
        kept = cache / f"native-{made_of}.so"
        if _is_ours(kept):
            with suppress(OSError):  # a file that is broken, or a place where nothing may be run
                return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(prefix="focus-hf-") as folder:
            made = Path(folder) / kept.name
            if "ziglang" in compiler:
                _log.warning("Focus attention is compiled for this processor, once: about a minute.")
            _compile(compiler, made)
            loaded = ctypes.CDLL(str(made))
            _keep(made, kept)
        return loaded
    except (OSError, RuntimeError) as error:
        _log.warning("Focus attention on this CPU is slower than it can be: %s", error)
        return str(error)


def _compiler() -> list[str]:
    """The command of one, the machine's own before Zig's, which is a Python package; nothing where there is none."""
    own = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, ("c++", "g++", "clang++"))][:1]
    return own or ([sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else [])


def _is_ours(file: Path) -> bool:
    """Whether there is a file that nobody but this user may have written: what is loaded is run."""
    try:
        state = file.stat()
    except OSError:
        return False
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _processor() -> str:
    """What this machine's processor can do: a home directory may be shared with others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _compile(compiler: list[str], target: Path) -> None:
    """Compile the sources.

    Raises:
        RuntimeError: the compiler does not.
    """
    said, beside = "", str(target.parent)
    environment = {"ZIG_GLOBAL_CACHE_DIR": beside, "ZIG_LOCAL_CACHE_DIR": beside, **os.environ}  # else Zig keeps 90 MB
    for extra in _EXTRAS:
        command = [*compiler, *_FLAGS, *extra, *(str(_HERE / name) for name in _SOURCES[:2]), "-o", str(target)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{shlex.join(compiler)} took more than five minutes") from None
        if done.returncode == 0:
            return
        said = said or done.stderr.strip()
    why = said.splitlines()[0] if said else "it does not say why"
    raise RuntimeError(f"{shlex.join(compiler)} does not compile it: {why}")


def _keep(made: Path, kept: Path) -> None:
    """Put a file where the next process finds it; without a place for it, each makes its own."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
            copy = shutil.copyfile(made, Path(beside) / kept.name)
            copy.chmod(0o600)
            os.replace(copy, kept)
    except OSError:
        _log.info("%s cannot be written", kept)
